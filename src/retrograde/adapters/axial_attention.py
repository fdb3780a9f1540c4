"""The drop-in for `axial_attention.reversible` (axial-attention 0.6.1): streams along the channels, dimension 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.sequence import ReversibleSequence as EngineSequence

from ._dropin import Branch, PlainBlock, PublishedBlock, branches_of
from ._dropin import Deterministic as Deterministic
from ._routes import Arguments, by_letter

CHANNELS = 1


class _AxialBranch(Branch):
    def __call__(self, x: Tensor, *, kwargs: Mapping[str, Arguments] | None = None) -> Any:
        return self.module(self.as_published(x), **(kwargs or {}).get(self.letter, {}))


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__(_AxialBranch("f", 0, (1,), CHANNELS), _AxialBranch("g", 1, (0,)), f=f, g=g)


class IrreversibleBlock(PlainBlock):
    """The irreversible version, on a tensor that holds both streams."""

    dim = CHANNELS


class ReversibleSequence(EngineSequence):
    """`(x, arg_route, **kwargs)` → the mean of the streams; `arg_route` says whether f and g receive the arguments."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        super().__init__([ReversibleBlock(f, g) for f, g in branches_of(blocks, "fg")], merge=None, dim=CHANNELS)

    def forward(self, x: Tensor, arg_route: Sequence[bool] = (True, True), **kwargs: Any) -> Tensor:  # type: ignore[override]
        if x.ndim <= CHANNELS:
            raise ValueError(f"An input of shape {tuple(x.shape)} has no channels: they are dimension {CHANNELS}.")
        outputs = self.run(x, kwargs=by_letter(arg_route, kwargs))
        return torch.stack(tuple(outputs)).mean(dim=0)
