"""A residual network with momentum."""

from __future__ import annotations

from collections.abc import Sequence

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.ready_made import momentum

from ._convolution import Convolutions, StagedClassifier


class MomentumResNet(StagedClassifier):
    """A ResNet whose blocks carry a velocity, which makes them reversible: `v = γ v + (1 - γ) f(x)`, then `x += v`.

    Sander, Ablin, Blondel, Peyré: "Momentum Residual Neural Networks" (2021). The blocks keep the full width: it is
    the ResNet of the same shape if γ is 0. Inverting a block divides by γ, which magnifies rounding errors by `1/γ`:
    at γ = 0.9 about 40,000 times over 100 consecutive blocks. Deep stages need anchors, see `retrograde.Plan`.

    Args:
        classes: the number of outputs.
        widths, depths: the channels and the blocks of each stage; an image's sides are halved between stages.
        gamma: how much of the velocity a block keeps, between 0 and 1.
        channels: of the images.
        memory: as in `ReversibleSequence`; with "reverse", transitions are checkpointed. In a list, a transition
            is a block of its own.

    Examples:
        >>> import torch
        >>> from retrograde.models import MomentumResNet
        >>> model = MomentumResNet(classes=10, widths=(8, 16), depths=(2, 2), gamma=0.9)
        >>> model(torch.randn(4, 3, 16, 16)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int] = (32, 64, 128),
        depths: Sequence[int] = (3, 3, 3),
        *,
        gamma: float = 0.9,
        channels: int = 3,
        memory: Memory = "reverse",
    ) -> None:
        def block(width: int) -> Block:
            return momentum(Convolutions(width), gamma=gamma)

        super().__init__(classes, channels, widths, depths, block, merge="first", memory=memory)
