"""Modules in tiles under DDP and FSDP2, two processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg
from joined import part
from team import in_processes


def layers(size: int | None) -> nn.Sequential:
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double() for _ in range(2)]
    return nn.Sequential(*(nn.Sequential(m if size is None else rg.nn.Tiled(m, size)) for m in modules))


def gradients(model: nn.Module, x: Tensor, rounds: int = 2) -> list[Tensor]:
    for _ in range(rounds):  # gradients accumulate
        model(x).square().mean().backward()
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in (p.grad for p in model.parameters())]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@in_processes(2)
def test_tiles_in_two_processes_give_the_gradients_of_one(rank: int, way: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 7, 8, dtype=torch.float64)
    model = layers(3)
    if way == "fsdp2":
        for layer in model:
            fully_shard(layer)
    model = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
    for ours, theirs in zip(gradients(model, part(x)), gradients(layers(None), x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@in_processes(2)
def test_a_tiled_module_that_is_sharded_itself_is_refused(rank: int) -> None:
    model = layers(3)
    fully_shard(model[0][0].module)
    with pytest.raises(RuntimeError, match="Call fully_shard on a module around the Tiled one"):
        model(torch.randn(2, 7, 8, dtype=torch.float64))
