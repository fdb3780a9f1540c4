"""Branches of convolutions, and stages of blocks with a transition to smaller, wider images between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.ready_made import transition
from retrograde.sequence import ReversibleSequence

from ._depth import embedded, shrink_updates
from ._hub import HubModel


class Convolutions(nn.Sequential):
    """The basic residual branch: norm, ReLU and a 3×3 convolution, twice (He et al., 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_in = nn.BatchNorm2d(width)
        self.relu_in = nn.ReLU()
        self.convolve = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_out = nn.BatchNorm2d(width)
        self.relu_out = nn.ReLU()
        self.update = nn.Conv2d(width, width, 3, padding=1, bias=False)


class Shrink(nn.Module):
    """Halve the height and width of an image, and change its number of channels; the dtype stays."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.convolve = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return embedded(F.relu(self.norm(x)), self.convolve)


class Pyramid(nn.Module):
    """A convolution of an image, and coarser versions of it, each with half the sides of the one before."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.shrink = nn.ModuleList(Shrink(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        height, width = images.shape[2:]
        if height % 2 ** len(self.shrink) or width % 2 ** len(self.shrink):
            raise ValueError(
                f"Images of {height}×{width} cannot be halved {len(self.shrink)} times; give sides that are multiples "
                f"of {2 ** len(self.shrink)}, or fewer widths."
            )
        levels = [embedded(images, self.stem)]
        for shrink in self.shrink:
            levels.append(shrink(levels[-1]))
        return tuple(levels)


class StagedClassifier(HubModel):
    """A convolution, stages of blocks on two streams, and a linear layer of the mean over the image.

    Args:
        classes: the number of outputs.
        channels: of the images.
        block: makes a block for streams of a given width.
        merge: "concat" if the streams are the halves of the channels, "first" if the first has all of them.
    """

    def __init__(
        self,
        classes: int,
        channels: int,
        widths: Sequence[int],
        depths: Sequence[int],
        block: Callable[[int], Block],
        *,
        merge: Literal["concat", "first"],
        memory: Memory,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        halves = merge == "concat"
        blocks = _stages([width // 2 if halves else width for width in widths], depths, block)
        stack = ReversibleSequence(blocks, split="chunk" if halves else "first", merge=merge, dim=1, memory=memory)
        self.stack = shrink_updates(stack)
        self.head = nn.Sequential(
            nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, height, width)` to the logits `(batch, classes)`."""
        logits: Tensor = self.head(self.stack(embedded(images, self.stem)))
        return logits


def _stages(widths: Sequence[int], depths: Sequence[int], block: Callable[[int], Block]) -> list[Block]:
    """Stages of `depths[i]` blocks of width `widths[i]`, with a transition of both streams in between."""
    if len(widths) != len(depths) or not widths:
        raise ValueError(f"widths={tuple(widths)} and depths={tuple(depths)}: give a width and a depth for each stage.")
    blocks: list[Block] = []
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if i:
            blocks.append(transition(Shrink(widths[i - 1], width), Shrink(widths[i - 1], width)))
        blocks += [block(width) for _ in range(depth)]
    return blocks
