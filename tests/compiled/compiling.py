"""Small models to compile, and what can be counted of a compiler at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

WIDTH = 8

QUIET = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.* is deprecated:DeprecationWarning",  # torch's own, when it loads its compiler
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the tracer looks at every attribute
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",  # the tracer does
)


class Mlp(nn.Module):
    """Linear, tanh, dropout, linear; shifted and scaled by context where it is given."""

    def __init__(self, dropout: float = 0.0, out: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 12), nn.Linear(12, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Tensor:
        h = torch.tanh(self.inner(x if shift is None else x + shift))
        update: Tensor = self.outer(self.dropout(h)) * factor
        return update


class Model(nn.Module):
    """A stack between two layers, so that there is something to compile on both sides of it."""

    def __init__(self, blocks: Sequence[rg.Block], **options: Any) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stack = rg.ReversibleSequence(blocks, **options)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        y: Tensor = self.leave(self.stack(self.enter(x), **context)).sin()
        return y


class Graphs:
    """A backend that counts the graphs it is given, and runs them without a code generator."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


def breaks() -> Counter[str]:
    """Why graphs were broken since the last reset, and how often."""
    from torch._dynamo.utils import counters

    return counters["graph_break"]


def gradients(run: Callable[..., Tensor], x: Tensor, leaves: Sequence[Tensor], **context: Any) -> list[Tensor]:
    """The output and the gradients of some leaves, with the generator started anew."""
    torch.manual_seed(3)
    y = run(x, **context)
    return [y.detach(), *torch.autograd.grad((y.sin() * y).sum(), list(leaves))]


def assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    """Equal to a relative error, measured against the largest entry."""
    assert len(found) == len(wanted) > 1
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error, scale = (a - b).abs().max().item(), b.abs().max().item()
        assert error <= tolerance * scale, f"entry {i}: off by {error:.3g}, where the largest entry is {scale:.3g}"
