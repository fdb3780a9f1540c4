"""Who is compared: plain autograd, retrograde in its memory modes, and the fastest peer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg
from models import Pairs

Run = Callable[[Tensor], Tensor]


def plain(pairs: Pairs) -> Run:
    """Stored activations, the streams in one tensor as published modules keep them: the baseline."""

    def run(x: Tensor) -> Tensor:
        both = torch.cat([x, x], -1)
        for f, g in pairs:
            first, second = both.chunk(2, -1)
            first = first + f(second)
            second = second + g(first)
            both = torch.cat([first, second], -1)
        first, second = both.chunk(2, -1)
        return (first + second) / 2

    return run


def pair(pairs: Pairs) -> Run:
    """Stored activations, the streams as a pair."""

    def run(x: Tensor) -> Tensor:
        first = second = x
        for f, g in pairs:
            first = first + f(second)
            second = second + g(first)
        return (first + second) / 2

    return run


def retrograde(memory: rg.Plan | str) -> Callable[[Pairs], Run]:
    def contender(pairs: Pairs) -> Run:
        stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=memory)  # type: ignore[arg-type]
        return lambda x: stack(x)  # type: ignore[return-value]

    return contender


def torch_checkpoint(pairs: Pairs) -> Run:
    """torch.utils.checkpoint around every block, non-reentrant."""
    from torch.utils.checkpoint import checkpoint

    def block(f: nn.Module, g: nn.Module, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        first = first + f(second)
        return first, second + g(first)

    def run(x: Tensor) -> Tensor:
        first = second = x
        for f, g in pairs:
            first, second = checkpoint(block, f, g, first, second, use_reentrant=False)  # type: ignore[misc]
        return (first + second) / 2

    return run


def revtorch(pairs: Pairs) -> Run:
    """RevTorch 0.2.4, the fastest of the published libraries."""
    from revtorch import ReversibleBlock, ReversibleSequence

    blocks = nn.ModuleList([ReversibleBlock(f, g, split_along_dim=-1) for f, g in pairs])
    stack = ReversibleSequence(blocks)

    def run(x: Tensor) -> Tensor:
        first, second = stack(torch.cat([x, x], -1)).chunk(2, -1)
        return (first + second) / 2

    return run


CONTENDERS: dict[str, Callable[[Pairs], Run]] = {
    "plain": plain,
    "plain, a pair": pair,
    "retrograde store": retrograde("store"),
    "retrograde checkpoint": retrograde("checkpoint"),
    "retrograde reverse": retrograde("reverse"),
    "torch checkpoint": torch_checkpoint,
    "RevTorch 0.2.4": revtorch,
}
