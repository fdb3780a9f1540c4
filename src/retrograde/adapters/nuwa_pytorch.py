"""In the place of `nuwa_pytorch.reversible` (nuwa-pytorch 0.7.8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._sequence import ReversibleSequence as EngineSequence
from retrograde._step import Step

from ._dropin import Branch, PublishedBlock, branches_of, named
from ._dropin import Deterministic as Deterministic
from ._routes import Routes, check_routes, chosen, names_for, routed


class _NuwaBranch(Branch):
    def __init__(self, letter: str, dim: int | None, names: Sequence[str]) -> None:
        super().__init__(letter, dim)
        self.names = tuple(names)

    def __call__(self, x: Tensor, *, kwargs: dict[str, Any] | None = None) -> Any:
        return self.module(self.seen(x), **chosen(self.names, kwargs or {}))


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`.

    Args:
        names: the arguments of a call that f receives, and those that g receives.
    """

    def __init__(self, f: nn.Module, g: nn.Module, *, names: tuple[Sequence[str], Sequence[str]] = ((), ())) -> None:
        super().__init__(
            Step(_NuwaBranch("f", -1, names[0]), 0, (1,), name=named("f", f)),
            Step(_NuwaBranch("g", None, names[1]), 1, (0,), name=named("g", g)),
            f=f,
            g=g,
        )


class ReversibleSequence(EngineSequence):
    """`(x, **kwargs)` → the sum of the streams."""

    def __init__(self, blocks: Iterable[Any], args_route: Routes | None = None) -> None:
        pairs = branches_of(blocks, "fg")
        routes = dict(args_route or {})
        check_routes(routes, len(pairs))
        super().__init__(
            [ReversibleBlock(f, g, names=names_for(routes, i)) for i, (f, g) in enumerate(pairs)], merge=None
        )
        self.args_route = routes

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        outputs = self.run(x, kwargs={n: _own(value) for n, value in routed(self.args_route, kwargs).items()})
        return torch.stack(tuple(outputs)).sum(dim=0)


def _own(value: Any) -> Any:
    """A copy, if it is a mask: NUWA edits its text's mask in place once the encoder has run."""
    return value.clone() if isinstance(value, Tensor) and value.dtype == torch.bool else value
