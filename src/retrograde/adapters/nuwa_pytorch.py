"""The drop-in for `nuwa_pytorch.reversible` (nuwa-pytorch 0.7.8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.sequence import ReversibleSequence as EngineSequence

from ._dropin import Deterministic as Deterministic
from ._dropin import PublishedBlock, branches_of
from ._routes import Arguments, RoutedBranch, Routes, checked_routes, chosen, names_for, routed


class _NuwaBranch(RoutedBranch):
    def __call__(self, x: Tensor, *, kwargs: Arguments | None = None) -> Any:
        return self.module(self.as_published(x), **chosen(self.names, kwargs or {}))


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`.

    Args:
        names: the arguments of a call that f receives, and those that g receives.
    """

    def __init__(self, f: nn.Module, g: nn.Module, *, names: tuple[Sequence[str], Sequence[str]] = ((), ())) -> None:
        super().__init__(_NuwaBranch("f", 0, (1,), names[0], dim=-1), _NuwaBranch("g", 1, (0,), names[1]), f=f, g=g)


class ReversibleSequence(EngineSequence):
    """`(x, **kwargs)` → the sum of the streams."""

    def __init__(self, blocks: Iterable[Any], args_route: Routes | None = None) -> None:
        pairs = branches_of(blocks, "fg")
        routes = checked_routes(args_route, len(pairs))
        super().__init__(
            [ReversibleBlock(f, g, names=names_for(routes, i)) for i, (f, g) in enumerate(pairs)], merge=None
        )
        self.args_route = routes

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        outputs = self.run(x, kwargs={n: _copy_of_mask(value) for n, value in routed(self.args_route, kwargs).items()})
        return torch.stack(tuple(outputs)).sum(dim=0)


def _copy_of_mask(value: Any) -> Any:
    """A copy of a mask: NUWA edits its text's mask in place once the encoder has run. Other values are unchanged."""
    return value.clone() if isinstance(value, Tensor) and value.dtype == torch.bool else value
