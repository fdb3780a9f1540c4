"""A network of reversible columns for images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.couplings import Affine
from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence

from ._convolution import Pyramid
from ._depth import shrink_updates
from ._hub import HubModel

_LIMIT = 1.0  # of the logarithm of a scale: inverting a step magnifies rounding errors at most e times


class Level(nn.Module):
    """The branch of one level: what it takes over from a finer and a coarser one, and the logarithm of its scale."""

    def __init__(self, width: int, finer: int | None, coarser: int | None) -> None:
        super().__init__()
        self.down = None if finer is None else nn.Conv2d(finer, width, 2, stride=2)
        self.up = None if coarser is None else nn.Conv2d(coarser, width, 1)
        self.norm = nn.GroupNorm(1, width)
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.widen = nn.Conv2d(width, 2 * width, 1)
        self.update = nn.Conv2d(2 * width, width, 1)
        self.log_scale = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Of the finer level and of the coarser one, where there are both."""
        parts = []
        if self.down is not None:
            parts.append(self.down(others[0]))
        if self.up is not None:
            parts.append(F.interpolate(self.up(others[-1]), scale_factor=2.0))
        return self._fused(torch.stack(parts).sum(0))

    def _fused(self, x: Tensor) -> tuple[Tensor, Tensor]:
        update = self.update(F.gelu(self.widen(self.mix(self.norm(x)))))
        return self.log_scale.expand_as(update), update


class FirstLevel(Level):
    """The finest level, which reads the stem in every column."""

    def forward(self, coarser: Tensor, stem: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert self.up is not None
        return self._fused(stem + F.interpolate(self.up(coarser), scale_factor=2.0))


class RevCol(HubModel):
    """Columns of levels: each level is scaled, and updated from the finer one of its column and the coarser one before.

    Cai, Zhou, Han, Sun, Kong, Li, Zhang: "Reversible Column Networks" (2022). With `x[l]` the stream of level l, of its
    own resolution, a column is `x[l] = scale[l] * x[l] + f(x[l-1], x[l+1])` for each l in turn; the first level reads
    the stem. The scales are learned per channel, between 1/e and e, and start at 1. Here the streams start
    as a pyramid of the stem, not at zero.

    Args:
        classes: the number of outputs.
        widths: the channels of each level; an image's sides are halved from level to level.
        columns: how many columns there are.
        channels: of the images.
        memory: as in `ReversibleSequence`, with one block per column.

    Examples:
        >>> import torch
        >>> from retrograde.models import RevCol
        >>> model = RevCol(classes=10, widths=(8, 16, 32), columns=4)
        >>> model(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int] = (32, 64, 128),
        columns: int = 8,
        *,
        channels: int = 3,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        if len(widths) < 2:
            raise ValueError(f"widths={tuple(widths)}: give two levels or more, which read each other.")
        self.pyramid = Pyramid(channels, widths)
        blocks = [_column(widths) for _ in range(columns)]
        self.stack = shrink_updates(ReversibleSequence(blocks, merge=None, memory=memory))
        self.head = nn.Sequential(
            nn.GroupNorm(1, widths[-1]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, height, width)` to the logits `(batch, classes)`."""
        levels = self.pyramid(images)
        logits: Tensor = self.head(self.stack(levels, stem=levels[0])[-1])
        return logits


def _column(widths: Sequence[int]) -> Block:
    coupling, last = Affine(limit=_LIMIT), len(widths) - 1
    steps = [Step(FirstLevel(widths[0], None, widths[1]), target=0, sources=(1,), coupling=coupling)]
    for i in range(1, last + 1):
        level = Level(widths[i], widths[i - 1], None if i == last else widths[i + 1])
        steps.append(Step(level, target=i, sources=(i - 1,) if i == last else (i - 1, i + 1), coupling=coupling))
    return Block(*steps)
