"""backend="retrograde" with DistributedDataParallel: around the compiled model, and compiled itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg
from compiling import QUIET, WIDTH, ByRule, Mlp, Model, assert_close, gradients

pytestmark = [QUIET, pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")]


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("order", ["DDP of a compiled model", "a compiled DDP"])
def test_ddp_has_the_gradients_of_the_eager_model(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)  # so that a small model has several
    torch.manual_seed(0)
    model = Model([rg.two_stream(Mlp(), Mlp()) for _ in range(3)])
    x, leaves, backend = torch.randn(6, WIDTH), list(model.parameters()), ByRule()
    wanted = gradients(model, x, leaves)
    if order == "a compiled DDP":
        run = torch.compile(DistributedDataParallel(model, bucket_cap_mb=0.001), backend=backend)
    else:
        run = DistributedDataParallel(torch.compile(model, backend=backend))
    y = run(x)
    (y.sin() * y).sum().backward()
    assert_close([y.detach(), *(p.grad for p in leaves if p.grad is not None)], wanted, 1e-5)
    assert backend.graphs > 1  # the compiler splits the graph where buckets end
