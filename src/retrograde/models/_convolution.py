"""Branches of convolutions, and stages of blocks with a transition to smaller, wider images between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from retrograde._block import Block, transition
from retrograde._sequence import ReversibleSequence
from retrograde._streams import Merge, Split

from ._depth import MemoryChoice, embedded, fitting, shrink_updates


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
    """Half the height and width of an image, in another number of channels and the same dtype."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.convolve = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return embedded(F.relu(self.norm(x)), self.convolve)


class Classifier(nn.Sequential):
    """Norm, ReLU, the mean over an image, and a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(
            nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
        )


def stages(
    widths: Sequence[int],
    depths: Sequence[int],
    block: Callable[[int], Block],
    shrink: Callable[[int, int], nn.Module],
    *,
    split: Split,
    merge: Merge,
    memory: MemoryChoice,
) -> ReversibleSequence:
    """Stages of `depths[i]` blocks of width `widths[i]` on two streams, which `shrink` changes in between."""
    if len(widths) != len(depths) or not widths:
        raise ValueError(f"widths={tuple(widths)} and depths={tuple(depths)}: give a width and a depth for each stage.")
    blocks: list[Block] = []
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if i:
            before = widths[i - 1]
            blocks.append(transition(shrink(before, width), shrink(before, width)))
        blocks += [block(width) for _ in range(depth)]
    sequence = ReversibleSequence(blocks, split=split, merge=merge, dim=1, memory=fitting(memory, blocks))
    return shrink_updates(sequence)
