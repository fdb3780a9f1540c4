"""What deep stacks need: precise streams, updates that are small at first, a memory mode that fits each block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from retrograde._block import Block
from retrograde._plan import INVERTING, Memory, Plan
from retrograde._sequence import ReversibleSequence

MemoryChoice = Memory | Sequence[Memory] | Plan


def embedded(x: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
    """The layer's output in the dtype of its weight, for streams to start from.

    Under autocast it would be of lower precision, in which rebuilt streams drift; branches may be so.
    """
    return layer(x).to(layer.weight.dtype)  # type: ignore[no-any-return]


def fitting(memory: MemoryChoice, blocks: Sequence[Block]) -> MemoryChoice:
    """The memory of each block: where all are to be inverted, stage transitions get "checkpoint"."""
    if isinstance(memory, str) and memory in INVERTING:
        return [memory if block.invertible else "checkpoint" for block in blocks]
    return memory


@torch.no_grad()
def shrink_updates(stack: ReversibleSequence) -> ReversibleSequence:
    """Scale the last layer of each branch, which is called `update`, to the number of updates that a stream gets.

    The sum of all updates then starts as large as one of them would be: training starts alike at any depth.
    """
    blocks = [block for block in stack.blocks if isinstance(block, Block) and block.invertible]
    scale = (len(stack.names) / sum(len(block.steps) for block in blocks)) ** 0.5
    for name, module in stack.named_modules():
        if name.endswith(".update") and isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight.mul_(scale)
            if module.bias is not None:
                module.bias.zero_()
    return stack
