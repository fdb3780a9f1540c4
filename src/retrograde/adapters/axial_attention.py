"""In the place of `axial_attention.reversible` (axial-attention 0.6.1): streams along the channels, dimension 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._sequence import ReversibleSequence as EngineSequence
from retrograde._step import Step

from ._dropin import Branch, PlainBlock, PublishedBlock, branches_of, named
from ._dropin import Deterministic as Deterministic
from ._routes import by_route

CHANNELS = 1


class _AxialBranch(Branch):
    def __call__(self, x: Tensor, *, kwargs: dict[str, Any] | None = None) -> Any:
        return self.module(self.seen(x), **(kwargs or {}))


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__(
            Step(_AxialBranch("f", CHANNELS), 0, (1,), takes={"kwargs": "f"}, name=named("f", f)),
            Step(_AxialBranch("g"), 1, (0,), takes={"kwargs": "g"}, name=named("g", g)),
            f=f,
            g=g,
        )


class IrreversibleBlock(PlainBlock):
    """The plain twin, on a tensor that holds both streams."""

    dim = CHANNELS


class ReversibleSequence(EngineSequence):
    """`(x, arg_route, **kwargs)` → the mean of the streams; `arg_route` says whether f and g receive the arguments."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        super().__init__([ReversibleBlock(f, g) for f, g in branches_of(blocks, "fg")], merge=None, dim=CHANNELS)

    def forward(self, x: Tensor, arg_route: Sequence[bool] = (True, True), **kwargs: Any) -> Tensor:  # type: ignore[override]
        if x.ndim <= CHANNELS:
            raise ValueError(f"An input of shape {tuple(x.shape)} has no channels: they are dimension {CHANNELS}.")
        f, g = by_route(arg_route, kwargs)
        outputs = self.run(x, f=f, g=g)
        return torch.stack(tuple(outputs)).mean(dim=0)
