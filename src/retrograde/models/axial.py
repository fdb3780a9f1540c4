"""Attention along one axis of an image at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence

from ._attention import SelfAttention
from ._depth import embedded, shrink_updates
from ._feed_forward import FeedForward
from ._hub import HubModel


class AxialAttention(SelfAttention):
    """Attention of the entries of `(batch, height, width, channels)` to those in the same row or column.

    Args:
        axis: the axis to attend along: 1 is up and down, 2 is left and right.
    """

    def __init__(self, width: int, heads: int, axis: int, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        lines = x.transpose(self.axis, -2)
        update = super().forward(lines.flatten(0, -3))
        return update.view(lines.shape).transpose(self.axis, -2)


class AxialImageTransformer(HubModel):
    """A reversible transformer from images to images of the same size, whose cost grows as pixels × (height + width).

    Ho, Kalchbrenner, Weissenborn, Salimans: "Axial Attention in Multidimensional Transformers" (2019).

    Args:
        channels, outputs: the channels of the images that come in and go out.
        size: the height and width of the images; smaller images work too.
        width, depth, heads: of the streams, the blocks (each attends along both axes), the heads of each attention.
        dropout: on the updates of all branches.
        memory: as in `ReversibleSequence`.

    Examples:
        >>> import torch
        >>> from retrograde.models import AxialImageTransformer
        >>> model = AxialImageTransformer(channels=3, outputs=5, size=(8, 12), width=16, depth=2, heads=2)
        >>> model(torch.randn(2, 3, 8, 12)).shape
        torch.Size([2, 5, 8, 12])
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        size: tuple[int, int],
        *,
        width: int = 128,
        depth: int = 8,
        heads: int = 8,
        dropout: float = 0.0,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(channels, width)
        self.rows = nn.Parameter(0.02 * torch.randn(size[0], 1, width))
        self.columns = nn.Parameter(0.02 * torch.randn(size[1], width))
        blocks = [
            Block(
                Step(AxialAttention(width, heads, axis=2, dropout=dropout), target=0, sources=(1,)),
                Step(FeedForward(width, dropout=dropout), target=1, sources=(0,)),
                Step(AxialAttention(width, heads, axis=1, dropout=dropout), target=0, sources=(1,)),
                Step(FeedForward(width, dropout=dropout), target=1, sources=(0,)),
            )
            for _ in range(depth)
        ]
        self.stack = shrink_updates(ReversibleSequence(blocks, memory=memory))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, height, width)` to `(batch, outputs, height, width)`."""
        height, width = images.shape[-2:]
        if height > len(self.rows) or width > len(self.columns):
            raise ValueError(
                f"Images of {height}×{width} were given to a model of size {len(self.rows)}×{len(self.columns)}, which "
                "has no positions beyond that: crop them, or build it with a larger size."
            )
        x = embedded(images.movedim(1, -1), self.embed) + self.rows[:height] + self.columns[:width]
        output: Tensor = self.head(self.stack(x))
        return output.movedim(-1, 1)
