"""A model as one rank of a job has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrograde.measure.stacks import stacks_of

from .jobs import Job


def sharded(model: nn.Module, job: Job, mesh: Any) -> nn.Module:
    """The model, sharded for FSDP2 and HSDP: each block, then the rest. Otherwise as it is.

    DDP's reducer cannot be made without values; its buckets are added to what the step allocates.
    """
    if job.shard not in ("fsdp2", "hsdp"):
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = job.autocast_dtype
    # Streams keep their dtype (a block that casts them cannot be inverted); autocast casts what branches read.
    reduce_dtype = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for stack in stacks_of(model).values():
        for block in stack.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def bucket_bytes(model: nn.Module) -> int:
    """The bytes of DDP's buckets: a copy of every gradient."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
