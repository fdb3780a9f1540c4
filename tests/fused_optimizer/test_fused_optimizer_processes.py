"""The fused optimiser with DDP and FSDP2, each in a process of its own with a process group of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn

import retrograde as rg
from retrograde.fused_optimizer import FusedOptimizer
from stacks import Mlp, sample
from test_fused_optimizer import AdamW, Model, fused, loss_of, tokens

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


def run_alone(scenario: str) -> str:
    """The output of a scenario of this file."""
    search = [str(Path(__file__).resolve().parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in search if path)}
    command = [sys.executable, __file__, scenario]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@needs_distributed
def test_distributed_data_parallel_is_refused() -> None:
    assert "DistributedDataParallel and GradScaler need all gradients at once" in run_alone("ddp")


@needs_distributed
def test_sharded_parameters_give_the_bits_of_the_ordinary_optimiser() -> None:
    assert run_alone("fsdp").split()[-1] == "equal"


def ddp() -> None:
    model = Model()
    optimizer = fused(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    try:
        loss_of(parallel(tokens(0))).backward()
    except RuntimeError as error:
        sys.stdout.write(str(error))
    optimizer.detach()


def fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, ends = init_device_mesh("cpu", (1,)), []
    for kind in (FusedOptimizer, None):
        torch.manual_seed(0)
        model = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(4)])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = fused(model, AdamW) if kind else AdamW(model.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model(sample(5, 6, seed=step))).backward()
            assert all((p.grad is None) is (kind is not None) for p in model.parameters())
            optimizer.step()
        ends.append([p.to_local().clone() for p in model.parameters()])  # type: ignore[attr-defined]
    sys.stdout.write("equal" if all(map(torch.equal, *ends)) else "different")


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    {"ddp": ddp, "fsdp": fsdp}[sys.argv[1]]()
    torch.distributed.destroy_process_group()
