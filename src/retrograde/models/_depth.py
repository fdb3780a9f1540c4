"""What deep stacks need: precise streams, and updates that are small at first."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retrograde.sequence import ReversibleSequence


def embedded(x: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
    """The layer's output in the dtype of its weight, for streams to start from.

    Autocast would lower its precision, and recomputed streams would drift; branches may run in lower precision.
    """
    return layer(x).to(layer.weight.dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def shrink_updates(stack: ReversibleSequence) -> ReversibleSequence:
    """Scale the last layer of each branch, which is called `update`, by the number of updates that a stream gets.

    The sum of all updates then starts as large as one of them would be: training starts the same way at any depth.
    """
    scale = (len(stack.names) / sum(len(block.steps) for block in stack if block.invertible)) ** 0.5
    for name, module in stack.named_modules():
        if name.endswith(".update") and isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight.mul_(scale)
            if module.bias is not None:
                module.bias.zero_()
    return stack
