"""DistributedDataParallel with find_unused_parameters, over gloo, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models import MODELS
from processes import two_processes
from published import missing, require

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]


def reports(names: list[str], which: str, store: Path) -> list[tuple[str, ...]]:
    """For each model, the report of each of two processes on its gradients."""
    return list(zip(*two_processes("ddp_worker.py", ",".join(names), which, store=store), strict=True))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """The reports on all models whose packages are installed; started once, as most of the time is torch's import."""
    names = [name for name, model in MODELS.items() if not missing(model.package)]
    store = tmp_path_factory.mktemp("ddp") / "store"
    return dict(zip(names, reports(names, "ours", store), strict=True)) if names else {}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_ddp_are_the_mean_over_processes(ours: dict[str, tuple[str, ...]], name: str) -> None:
    require(MODELS[name].package)
    assert ours[name] == ("right", "right")


@pytest.mark.parametrize("name", ["routing", "nuwa"])
def test_the_published_module_cannot_be_used_under_ddp(name: str, tmp_path: Path) -> None:
    """It accumulates gradients inside another backward: DDP sees parameters twice, or too early."""
    require(MODELS[name].package)
    ((*lines,),) = reports([name], "published", tmp_path / "store")
    assert all(report.startswith("raised") and "ready" in report for report in lines), lines
