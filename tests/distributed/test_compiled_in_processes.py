"""torch.compile(backend="retrograde"), two processes: gradients are those of one process on the joined batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from joined import batch, gradients_agree, once, part
from retrograde.engine.torch_internals import VERSION
from stacks import twins
from team import in_processes

pytestmark = pytest.mark.skipif(VERSION < (2, 13), reason='backend="retrograde" needs torch 2.13')


@contextmanager
def quiet() -> Iterator[None]:
    """A context without the warnings of torch's own compiler; ours stay errors."""
    with warnings.catch_warnings():
        for message in (".*torch.jit.script.*", "The .grad attribute of a Tensor", ".*should not be instantiated"):
            warnings.filterwarnings("ignore", message=message)
        yield


def compiled_step(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    """A step of both: one on a part of the batch, the other on all of it."""
    with quiet():
        once(model, part(batch())).backward()
    once(reference, batch()).backward()
    gradients_agree(model, reference)


@pytest.mark.parametrize("order", ["DDP of a compiled model", "a compiled DDP"])
@in_processes(2)
def test_ddp_gives_the_gradients_of_one_process_on_the_joined_batch(order: str) -> None:
    from compiling import ByRule

    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000  # type: ignore[attr-defined]  # so that a small model has several
    stack, reference = twins()
    backend = ByRule()
    if order == "a compiled DDP":
        model = torch.compile(DistributedDataParallel(stack, bucket_cap_mb=0.001), backend=backend)
    else:
        model = DistributedDataParallel(torch.compile(stack, backend=backend))  # type: ignore[arg-type]
    compiled_step(model, reference)  # type: ignore[arg-type]
    assert backend.graphs > 0


@pytest.mark.parametrize("way", ["blocks", "model"])
@in_processes(2)
def test_fsdp_stays_on_the_tape_with_a_warning_and_the_gradients_of_one_process(way: str) -> None:
    from compiling import ByRule

    stack, reference = twins()
    for block in stack.blocks if way == "blocks" else ():
        fully_shard(block)  # type: ignore[arg-type]
    model = torch.compile(fully_shard(stack), backend=ByRule())
    with pytest.warns(RuntimeWarning, match="its parameters are sharded"):
        compiled_step(model, reference)  # type: ignore[arg-type]
