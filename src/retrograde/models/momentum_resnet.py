"""A residual network with momentum."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from retrograde._block import momentum

from ._convolution import Classifier, Convolutions, Shrink, stages
from ._depth import MemoryChoice, embedded


class MomentumResNet(nn.Module):
    """A ResNet whose blocks carry a velocity, and are reversible for it: `v = γ v + (1 - γ) f(x)`, then `x += v`.

    Sander, Ablin, Blondel, Peyré: "Momentum Residual Neural Networks" (2021). The blocks keep the full width: it is
    the ResNet of the same shape if γ is 0. Rebuilding divides by γ, which magnifies rounding errors
    by `1/γ` a block: at 0.9 and 100 blocks in a row 40,000 times. Deep stages need anchors, see `retrograde.Plan`.

    Args:
        classes: the number of outputs.
        widths, depths: the channels and the blocks of each stage; an image's sides are halved between stages.
        gamma: how much of the velocity a block keeps, between 0 and 1.
        channels: of the images.
        memory: as in `ReversibleSequence`; where it is "reverse", transitions are "checkpoint". A list names
            transitions as blocks of their own.

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
        memory: MemoryChoice = "reverse",
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stack = stages(
            widths,
            depths,
            lambda width: momentum(Convolutions(width), gamma=gamma),
            Shrink,
            split="first",
            merge="first",
            memory=memory,
        )
        self.head = Classifier(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, height, width)` to the logits `(batch, classes)`."""
        logits: Tensor = self.head(self.stack(embedded(images, self.stem)))
        return logits
