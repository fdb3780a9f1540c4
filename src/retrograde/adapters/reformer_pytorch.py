"""In the place of `reformer_pytorch.reversible` (reformer-pytorch 1.4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._step import Step

from ._dropin import Branch, LayerDroppingSequence, PlainBlock, PublishedBlock, branches_of, named
from ._dropin import Deterministic as Deterministic
from ._notes import Notes
from ._routes import by_route

FEATURES = 2
CALLBACKS = frozenset({"callback"})
"""By which reformer_pytorch.Recorder looks at the attention."""


class _ReformerBranch(Branch):
    def __init__(self, letter: str, dim: int | None, depth: int | None) -> None:
        super().__init__(letter, dim)
        self.depth = depth

    def __call__(self, x: Tensor, *, kwargs: dict[str, Any], signals: bool, notes: Notes) -> Any:
        # The attention's cache, which _reverse=True makes it read, is filled in training mode alone.
        reverse = notes.replays(self) and self.module.training
        extra = {"_reverse": reverse, "_depth": self.depth} if signals else {}
        with notes.around(self, self.module):
            return self.module(self.seen(x), **kwargs, **extra)


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`; with `send_signal` both receive `_reverse` and `_depth`."""

    def __init__(self, f: nn.Module, g: nn.Module, depth: int | None = None, send_signal: bool = False) -> None:
        super().__init__(
            Step(_ReformerBranch("f", FEATURES, depth), 0, (1,), takes=_takes("f"), name=named("f", f)),
            Step(_ReformerBranch("g", None, depth), 1, (0,), takes=_takes("g"), name=named("g", g)),
            f=f,
            g=g,
        )
        self.depth = depth
        self.send_signal = send_signal


def _takes(letter: str) -> dict[str, str]:
    return {"kwargs": letter, "signals": "signals", "notes": "notes"}


class IrreversibleBlock(PlainBlock):
    """The plain twin, on a tensor that holds both streams."""

    dim = FEATURES


class ReversibleSequence(LayerDroppingSequence):
    """`(x_doubled, arg_route, **kwargs)` → the streams in one tensor, doubled as the input is.

    Sequences of at most `reverse_thres` entries are trained with stored activations.
    """

    def __init__(
        self, blocks: Iterable[Any], layer_dropout: float = 0.0, reverse_thres: int = 0, send_signal: bool = False
    ) -> None:
        pairs = branches_of(blocks, "fg")
        super().__init__(
            [ReversibleBlock(f, g, depth, send_signal) for depth, (f, g) in enumerate(pairs)],
            split="chunk",
            merge=None,
            dim=FEATURES,
            layer_drop=layer_dropout,
        )
        self.reverse_thres = reverse_thres
        self.send_signal = send_signal
        self.irrev_blocks = nn.ModuleList([IrreversibleBlock(f, g) for f, g in pairs])

    def forward(self, x: Tensor, arg_route: Sequence[bool] = (True, False), **kwargs: Any) -> Tensor:  # type: ignore[override]
        f, g = by_route(arg_route, kwargs)
        reverses = x.shape[1] > self.reverse_thres
        drops = self.training and self.layer_dropout > 0
        outputs = self.run(
            x,
            memory=None if reverses else "store",
            signals=self.send_signal and (reverses or drops),
            notes=Notes("after", silent=CALLBACKS),
            f=f,
            g=g,
        )
        return torch.cat(outputs, dim=FEATURES)
