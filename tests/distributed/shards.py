"""Ways to shard a reversible stack with FSDP2."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

import retrograde as rg

SHARDED = ("each branch", "each block", "the root", "all three")


def shard(model: nn.Module, way: str, **options: Any) -> nn.Module:
    """Shard a model that has one stack; inner modules are sharded first."""
    [stack] = [m for m in model.modules() if isinstance(m, rg.ReversibleSequence)]
    for block in stack.blocks:
        if way in ("each branch", "all three"):
            for branch in (step.branch for step in block.steps if isinstance(step.branch, nn.Module)):
                fully_shard(branch, **options)
        if way in ("each block", "all three"):
            fully_shard(block, **options)
    return fully_shard(model, **options)
