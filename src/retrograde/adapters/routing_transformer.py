"""The drop-in for `routing_transformer.reversible` (routing-transformer 1.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._dropin import Deterministic as Deterministic
from ._dropin import LayerDroppingSequence, PublishedBlock, branches_of
from ._routes import Arguments, RoutedBranch, Routes, checked_routes, chosen, names_for, routed
from ._untracked_state import UntrackedState

IGNORED = frozenset({"aux_loss"})
"""RoutingTransformerEncDec passes its encoder's loss to the decoder, in which no branch takes it."""


class _RoutingBranch(RoutedBranch):
    def __call__(self, x: Tensor, *, kwargs: Arguments, untracked: UntrackedState) -> tuple[Any, Any]:
        reverse = untracked.replays(self)
        with untracked.around(self, self.module):
            return with_loss(self.module(self.as_published(x), **chosen(self.names, kwargs), _reverse=reverse))


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`; both may return `(update, auxiliary loss)`, and both receive `_reverse`.

    Args:
        names: the arguments of a call that f receives, and those that g receives.
    """

    def __init__(self, f: nn.Module, g: nn.Module, *, names: tuple[Sequence[str], Sequence[str]] = ((), ())) -> None:
        branches = _RoutingBranch("f", 0, (1,), names[0], dim=-1), _RoutingBranch("g", 1, (0,), names[1])
        super().__init__(*branches, aux="loss", f=f, g=g)


class ReversibleSequence(LayerDroppingSequence):
    """`(x, **kwargs)` → `(mean of the streams, sum of the auxiliary losses)`."""

    def __init__(self, blocks: Iterable[Any], args_route: Routes | None = None, layer_dropout: float = 0.0) -> None:
        pairs = branches_of(blocks, "fg")
        routes = checked_routes(args_route, len(pairs))
        super().__init__(
            [ReversibleBlock(f, g, names=names_for(routes, i)) for i, (f, g) in enumerate(pairs)],
            merge=None,
            layer_drop=layer_dropout,
        )
        self.args_route = routes

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        kwargs = routed(self.args_route, kwargs, IGNORED)
        outputs = self.run(x, kwargs=kwargs, untracked=UntrackedState(buffers=True))
        f_losses, g_losses = zip(*outputs.aux_by_block.values(), strict=True)
        aux = torch.stack(f_losses).sum() + torch.stack(g_losses).sum()
        return torch.stack(tuple(outputs)).mean(dim=0), aux


class SequentialSequence(nn.Module):
    """The irreversible version: `x += f(x)`, then `x += g(x)`. Its auxiliary loss has the shape (1,)."""

    def __init__(self, layers: nn.ModuleList, args_route: Routes | None = None, layer_dropout: float = 0.0) -> None:
        super().__init__()
        self.args_route = checked_routes(args_route, len(layers))
        branches_of(layers, "fg")
        self.layers = layers
        self.layer_dropout = layer_dropout

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kwargs = routed(self.args_route, kwargs, IGNORED)
        aux = torch.zeros(1, device=x.device, dtype=x.dtype)
        for i in self._running():
            (branches,) = branches_of([self.layers[i]], "fg")
            for branch, names in zip(branches, names_for(self.args_route, i), strict=True):
                update, loss = with_loss(branch(x, **chosen(names, kwargs)))
                aux = aux + loss
                x = x + update
        return x, aux

    def _running(self) -> list[int]:
        every = list(range(len(self.layers)))
        if not self.training or not self.layer_dropout > 0:
            return every
        dropped = torch.empty(len(every)).uniform_(0, 1) < self.layer_dropout
        return [i for i in every if not dropped[i]] or every[:1]


def with_loss(result: Any) -> tuple[Any, Any]:
    """A branch's result as `(update, auxiliary loss)`; the loss is zero where it returns none."""
    if type(result) is not tuple:
        return result, torch.zeros((), device=result.device, dtype=result.dtype)
    update, loss = result
    return update, loss
