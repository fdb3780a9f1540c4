"""The six drop-ins with small branches, and the arithmetic of the published modules in plain autograd.

The references hold both streams in one tensor and pass views of its halves to the branches, as the published code
does: equal values are not enough for equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.adapters import (
    axial_attention,
    lie_transformer_pytorch,
    nuwa_pytorch,
    nuwa_pytorch_video_audio,
    reformer_pytorch,
    routing_transformer,
)

WIDTH = 7  # odd, so that the two halves of a doubled tensor are aligned differently
KINDS = ("intra_modality_self_attn", "intra_modality_cross_attn", "inter_modality_cross_attn")


class Mix(nn.Module):
    """Linear and dropout along one dimension. Adds the mean of every other tensor it is given, as an encoder's."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.3, dim: int = -1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.dim = dim

    def forward(self, x: Tensor, *others: Tensor, **kwargs: Any) -> Tensor:
        h = torch.tanh(self.linear(x.movedim(self.dim, -1)).movedim(-1, self.dim))
        for other in (*others, *kwargs.values()):
            if isinstance(other, Tensor) and other.is_floating_point():
                h = h + other.mean()
        return self.dropout(h)


class Spatial(Mix):
    """A branch of lie: takes and returns (coords, values, mask, edges)."""

    def forward(self, state: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        coords, values, mask, edges = state
        mixed = super().forward(values, coords, *([] if edges is None else [edges]))
        return coords, mixed * mask[..., None], mask, edges


class Spy(nn.Module):
    """A linear branch that records the arguments of each of its runs."""

    def __init__(self, width: int = WIDTH, *, dim: int = -1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).double()
        self.dim = dim
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor, *others: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append(kwargs)
        y: Tensor = self.linear(x.movedim(self.dim, -1)).movedim(-1, self.dim).tanh()
        return y + sum(other.mean() for other in others)


class WithLoss(Spy):
    def forward(self, x: Tensor, *others: Tensor, **kwargs: Any) -> Any:
        y = super().forward(x, *others, **kwargs)
        return y, y.square().mean()


def pairs(depth: int, count: int = 2, make: Callable[[], nn.Module] = Mix) -> nn.ModuleList:
    return nn.ModuleList([nn.ModuleList([make() for _ in range(count)]) for _ in range(depth)])


def spies(depth: int, count: int = 2, make: Callable[[], nn.Module] = Spy) -> Any:
    """As `pairs`, typed for looking into the branches."""
    return pairs(depth, count, make)


def streams(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def doubled(blocks: Any, x: Tensor, dim: int, kwargs: Sequence[dict[str, Any]] = ({}, {})) -> Tensor:
    """Two streams in one tensor, through `x1 += f(x2)`, `x2 += g(x1)`."""
    for f, g in blocks:
        x1, x2 = torch.chunk(x, 2, dim=dim)
        y1 = x1 + f(x2, **kwargs[0])
        y2 = x2 + g(y1, **kwargs[1])
        x = torch.cat([y1, y2], dim=dim)
    return x


def halves(x: Tensor, dim: int) -> Tensor:
    return torch.stack(x.chunk(2, dim=dim))


@dataclass
class System:
    """A drop-in, the branches it was made of, what to call it with, and the same in plain autograd.

    `run` and `plain` return the outputs that a loss may use.
    """

    module: nn.Module
    branches: nn.ModuleList
    inputs: dict[str, Tensor]
    run: Callable[..., list[Tensor]]
    plain: Callable[..., list[Tensor]]


def routing(depth: int) -> System:
    blocks = pairs(depth)
    routes = {"context": ((True, False),) * depth}
    module = routing_transformer.ReversibleSequence(blocks, args_route=routes)

    def plain(x: Tensor, context: Tensor) -> list[Tensor]:
        x = doubled(blocks, torch.cat([x, x], dim=-1), 2, ({"context": context}, {}))
        return [halves(x, -1).mean(dim=0)]

    inputs = {"x": torch.randn(2, 5, WIDTH), "context": torch.randn(2, 3)}
    return System(module, blocks, inputs, lambda x, context: [module(x, context=context)[0]], plain)


def nuwa(depth: int) -> System:
    blocks = pairs(depth)
    module = nuwa_pytorch.ReversibleSequence(blocks, args_route={"context": ((True, False),) * depth})

    def plain(x: Tensor, context: Tensor) -> list[Tensor]:
        x = doubled(blocks, torch.cat([x, x], dim=-1), 2, ({"context": context}, {}))
        return [halves(x, -1).sum(dim=0)]

    inputs = {"x": torch.randn(2, 5, WIDTH), "context": torch.randn(2, 3)}
    return System(module, blocks, inputs, lambda x, context: [module(x, context=context)], plain)


def axial(depth: int) -> System:
    blocks = pairs(depth, make=lambda: Mix(dim=1))
    module = axial_attention.ReversibleSequence(blocks)

    def plain(x: Tensor, context: Tensor) -> list[Tensor]:
        kwargs = {"context": context}
        return [halves(doubled(blocks, torch.cat((x, x), dim=1), 1, (kwargs, kwargs)), 1).mean(dim=0)]

    inputs = {"x": torch.randn(2, WIDTH, 3, 3), "context": torch.randn(2, 3)}
    return System(module, blocks, inputs, lambda x, context: [module(x, context=context)], plain)


def reformer(depth: int) -> System:
    blocks = pairs(depth)
    module = reformer_pytorch.ReversibleSequence(blocks)

    def plain(x: Tensor, context: Tensor) -> list[Tensor]:
        return [doubled(blocks, x, 2, ({"context": context}, {}))]

    inputs = {"x": torch.randn(2, 5, 2 * WIDTH), "context": torch.randn(2, 3)}
    return System(module, blocks, inputs, lambda x, context: [module(x, context=context)], plain)


def lie(depth: int) -> System:
    blocks = pairs(depth, make=Spatial)
    module = lie_transformer_pytorch.ReversibleSequence(blocks)

    def mask_of(x: Tensor) -> Tensor:
        return torch.arange(x.shape[1]) < torch.tensor([[5], [3]])

    def plain(x: Tensor, coords: Tensor, edges: Tensor) -> list[Tensor]:
        mask = mask_of(x)
        x = torch.cat((x, x), dim=-1)
        for f, g in blocks:
            x1, x2 = torch.chunk(x, 2, dim=2)
            y1 = f((coords, x2, mask, edges))[1] + x1
            y2 = g((coords, y1, mask, edges))[1] + x2
            x = torch.cat((y1, y2), dim=2)
        return [sum(x.chunk(2, dim=-1)) * 0.5]

    inputs = {"x": torch.randn(2, 5, WIDTH), "coords": torch.randn(2, 5, 5, 6), "edges": torch.randn(2, 5, 5, 2)}
    return System(module, blocks, inputs, lambda x, coords, edges: [module((coords, x, mask_of(x), edges))[1]], plain)


def video_audio(depth: int) -> System:
    blocks = pairs(depth, count=4)
    kinds = [KINDS[i % 3] for i in range(depth)]
    module = nuwa_pytorch_video_audio.DualModalityReversibleSequence(blocks, kinds)

    def plain(video: Tensor, audio: Tensor, context: Tensor) -> list[Tensor]:
        both = torch.cat((torch.cat((video, video), dim=-1), torch.cat((audio, audio), dim=-1)), dim=1)
        x, m = both[:, : video.shape[1]], both[:, video.shape[1] :]
        for (f, g, j, k), kind in zip(blocks, kinds, strict=True):
            (x1, x2), (m1, m2) = x.chunk(2, dim=2), m.chunk(2, dim=2)
            if kind == "inter_modality_cross_attn":
                y1 = x1 + f(x2, m2)
                y2 = x2 + k(y1)  # as published: the feed-forward that callers mean for audio
                n1 = m1 + j(m2, y2)
                n2 = m2 + g(n1)
            else:
                kwargs = {"context": context} if kind == "intra_modality_cross_attn" else {}
                y1 = x1 + f(x2, **kwargs)
                y2 = x2 + g(y1)
                n1 = m1 + j(m2, **kwargs)
                n2 = m2 + k(n1)
            x, m = torch.cat((y1, y2), dim=2), torch.cat((n1, n2), dim=2)
        return [halves(x, -1).mean(dim=0), halves(m, -1).mean(dim=0)]

    inputs = {"video": torch.randn(2, 6, WIDTH), "audio": torch.randn(2, 4, WIDTH), "context": torch.randn(2, 3, WIDTH)}
    return System(module, blocks, inputs, lambda video, audio, context: module(video, audio, context=context), plain)


SYSTEMS: dict[str, Callable[[int], System]] = {
    "routing_transformer": routing,
    "nuwa_pytorch": nuwa,
    "axial_attention": axial,
    "reformer_pytorch": reformer,
    "lie_transformer_pytorch": lie,
    "nuwa_pytorch_video_audio": video_audio,
}
