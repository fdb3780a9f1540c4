"""A reversible feature pyramid: streams of different resolution that read each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence

from ._convolution import Convolutions, Pyramid
from ._depth import shrink_updates
from ._hub import HubModel


class Resample(nn.Module):
    """An image in another resolution and width. `octaves` are the halvings of its sides; below 0, doublings."""

    def __init__(self, before: int, after: int, octaves: int) -> None:
        super().__init__()
        self.octaves = octaves
        self.norm = nn.GroupNorm(1, before)
        self.update = nn.Conv2d(before, after, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(x))
        if self.octaves > 0:
            x = F.avg_pool2d(x, 2**self.octaves)
        x = self.update(x)
        return x if self.octaves > 0 else F.interpolate(x, scale_factor=2.0**-self.octaves)


class Fuse(nn.Module):
    """The sum of other resolutions, each brought to one resolution. Each is given as two halves of its channels."""

    def __init__(self, others: Sequence[tuple[int, int]], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Resample(other, width, octaves) for other, octaves in others)

    def forward(self, *halves: Tensor) -> Tensor:
        images = [torch.cat(pair, 1) for pair in zip(halves[::2], halves[1::2], strict=True)]
        return torch.stack([part(image) for part, image in zip(self.parts, images, strict=True)]).sum(0)


class RevBiFPN(HubModel):
    """A pyramid of resolutions that are fused in both directions again and again, all of it reversible.

    Chiley, Thangarasa, Gupta, Samar, Hestness, DeCoste: "RevBiFPN: The Fully Reversible Bidirectional Feature Pyramid
    Network" (2022). Each resolution is a pair of streams, the halves of its channels. A stage fuses the
    resolutions (RevSilo: each coarser one takes over from all finer ones, then each finer one from all
    coarser ones) and runs a RevNet block on every pair.

    Args:
        classes: the number of outputs.
        widths: the channels of each resolution; an image's sides are halved from one to the next.
        depth: how many stages there are.
        channels: of the images.
        memory: as in `ReversibleSequence`, with two blocks per stage.

    Examples:
        >>> import torch
        >>> from retrograde.models import RevBiFPN
        >>> model = RevBiFPN(classes=10, widths=(8, 16, 32), depth=2)
        >>> model(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int] = (32, 64, 128),
        depth: int = 6,
        *,
        channels: int = 3,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        if len(widths) < 2 or any(width % 2 for width in widths):
            raise ValueError(f"widths={tuple(widths)}: give two resolutions or more, of an even number of channels.")
        self.pyramid = Pyramid(channels, widths)
        blocks = [block for _ in range(depth) for block in (_silo(widths), _residual(widths))]
        self.stack = shrink_updates(ReversibleSequence(blocks, merge=None, memory=memory))
        self.head = nn.Linear(sum(widths), classes)

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, height, width)` to the logits `(batch, classes)`."""
        halves = tuple(half.contiguous() for level in self.pyramid(images) for half in level.chunk(2, 1))
        means = torch.cat([half.mean((2, 3)) for half in self.stack(halves)], 1)
        logits: Tensor = self.head(means)
        return logits


def _silo(widths: Sequence[int]) -> Block:
    """Every resolution from all finer ones, the finest first; then every one from all coarser ones, back again."""
    levels = range(len(widths))
    order = [(i, range(i)) for i in levels[1:]] + [(i, levels[i + 1 :]) for i in reversed(levels[:-1])]
    return Block(
        *(
            Step(
                Fuse([(widths[j], i - j) for j in others], widths[i] // 2),
                target=2 * i + half,
                sources=[stream for j in others for stream in (2 * j, 2 * j + 1)],
            )
            for i, others in order
            for half in (0, 1)
        )
    )


def _residual(widths: Sequence[int]) -> Block:
    pairs = [(i, half) for i in range(len(widths)) for half in (0, 1)]
    return Block(*(Step(Convolutions(widths[i] // 2), target=2 * i + h, sources=(2 * i + 1 - h,)) for i, h in pairs))
