"""DistributedDataParallel with find_unused_parameters, over gloo, in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from published import missing, require

from models import MODELS

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

HERE = Path(__file__).resolve().parent


def reports(names: list[str], which: str, store: Path) -> list[tuple[str, ...]]:
    """For each model, what each of two processes says of its gradients."""
    search = [str(HERE), str(HERE.parents[1] / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in search if path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ddp_worker.py"), ",".join(names), which, str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs
    found = [out.strip().splitlines() for out, _ in outputs]
    return list(zip(*found, strict=True))


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
    """Its backward delivers gradients from within a backward: DDP sees parameters twice, or before their time."""
    require(MODELS[name].package)
    ((*found,),) = reports([name], "published", tmp_path / "store")
    assert all(report.startswith("raised") and "ready" in report for report in found), found
