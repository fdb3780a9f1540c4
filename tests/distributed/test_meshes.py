"""Meshes of processes: tensor parallel branches, HSDP, and FSDP over tensor parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import retrograde as rg
from joined import WIDTH, follow, gradients_agree, mean_loss
from shards import SHARDED, shard
from stacks import MEMORIES, assert_close, sample, twins
from team import in_processes


class Feed(nn.Module):
    """A branch with a norm, and a hidden layer that is to be split over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 8)
        self.outer = nn.Linear(8, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.outer(torch.tanh(self.inner(self.norm(x))))


def split_hidden(stack: rg.ReversibleSequence, mesh: DeviceMesh) -> None:
    """Split each branch's hidden layer over the processes; streams are the same in all of them."""
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    for module in stack.modules():
        if isinstance(module, Feed):
            parallelize_module(module, mesh, plan)


def split_sequence(stack: rg.ReversibleSequence, mesh: DeviceMesh) -> None:
    """Split the hidden layers, and each sequence between them: streams are DTensors."""
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "inner": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "outer": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for module in stack.modules():
        if isinstance(module, Feed):
            parallelize_module(module, mesh, plan)


@pytest.mark.parametrize("memory", MEMORIES)
@in_processes(2)
def test_tensor_parallel_branches_give_the_gradients_of_one_process(memory: str) -> None:
    stack, reference = twins(Feed, memory=memory, depth=5)
    split_hidden(stack, init_device_mesh("cpu", (2,)))
    follow(stack, reference, index=0, count=1)


@pytest.mark.parametrize("memory", MEMORIES)
@in_processes(2)
def test_streams_may_be_dtensors_that_are_sharded_over_the_sequence(memory: str) -> None:
    stack, reference = twins(Feed, memory=memory, depth=5)
    mesh = init_device_mesh("cpu", (2,))
    split_sequence(stack, mesh)
    x = sample(4, 6, WIDTH)
    streams = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    y = stack(streams)
    assert isinstance(y, DTensor)
    mean_loss(y.full_tensor()).backward()
    mean_loss(reference(x)).backward()
    gradients_agree(stack, reference)
    assert streams.grad is not None
    assert_close(streams.grad.full_tensor(), x.grad)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("way", SHARDED)
@in_processes(4)
def test_hsdp_gives_the_gradients_of_one_process_on_the_joined_batch(way: str, memory: str) -> None:
    stack, reference = twins(memory=memory)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    follow(shard(stack, way, mesh=mesh), reference)


@pytest.mark.parametrize("way", SHARDED)
@in_processes(4)
def test_fsdp_over_tensor_parallel_gives_the_gradients_of_one_process(way: str) -> None:
    stack, reference = twins(Feed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    split_hidden(stack, mesh["tensor"])
    shard(stack, way, mesh=mesh["data"])
    follow(stack, reference, index=mesh["data"].get_local_rank(), count=2)
