"""One of the processes of test_dropins_fsdp: shards drop-ins with FSDP2 and reports on their gradients.

    python fsdp_worker.py <rank> <file of the store>

Writes a line for each drop-in and way of sharding: name, way and the greatest relative error.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from systems import SYSTEMS, System

WORLD = 2
WAYS = ("each branch", "each block", "the root")


def shard(system: System, way: str, mesh: DeviceMesh) -> None:
    for block in system.module.blocks:
        if way == "each block":
            fully_shard(block, mesh=mesh)
        elif way == "each branch":
            for letter in "fgjk":
                if hasattr(block, letter):
                    fully_shard(getattr(block, letter).net, mesh=mesh)
    fully_shard(system.module, mesh=mesh)


def error_of(name: str, way: str, rank: int, mesh: DeviceMesh) -> float:
    """Sharded against the mean over the processes of plain gradients."""
    systems = []
    for _ in range(2):
        torch.manual_seed(0)
        systems.append(SYSTEMS[name](3))
        systems[-1].module.double()
        systems[-1].inputs = {key: value.double() for key, value in systems[-1].inputs.items()}
    sharded, plain = systems
    shard(sharded, way, mesh)
    for run, inputs in ((sharded.run, sharded.inputs), (plain.plain, plain.inputs)):
        torch.manual_seed(1 + rank)
        sum(o.square().mean() for o in run(**inputs)).backward()
    worst = 0.0
    for sharded_parameter, plain_parameter in zip(sharded.module.parameters(), plain.module.parameters(), strict=True):
        mean = plain_parameter.grad.clone()
        dist.all_reduce(mean)
        mean /= WORLD
        worst = max(worst, float((sharded_parameter.grad.full_tensor() - mean).norm() / mean.norm()))
    return worst


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in SYSTEMS:
        for way in WAYS:
            if (name, way) == ("reformer_pytorch", "each block"):
                continue  # its irrev_blocks hold the same modules outside of its blocks
            sys.stdout.write(f"{name}, {way}, {error_of(name, way, rank, mesh)}\n")
            sys.stdout.flush()
    os._exit(0)  # no waiting for the other process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
