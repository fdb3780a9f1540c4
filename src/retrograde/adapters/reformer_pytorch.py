"""The drop-in for `reformer_pytorch.reversible` (reformer-pytorch 1.4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._dropin import Branch, LayerDroppingSequence, PlainBlock, PublishedBlock, branches_of
from ._dropin import Deterministic as Deterministic
from ._routes import Arguments, by_letter
from ._untracked_state import UntrackedState

FEATURES = 2
CALLBACKS = frozenset({"callback"})
"""Attributes through which reformer_pytorch.Recorder looks at the attention."""


class _ReformerBranch(Branch):
    depth: int | None = None

    def __call__(self, x: Tensor, *, kwargs: Mapping[str, Arguments], signals: bool, untracked: UntrackedState) -> Any:
        # The attention's cache, which _reverse=True makes it read, is filled in training mode only.
        reverse = untracked.replays(self) and self.module.training
        extra = {"_reverse": reverse, "_depth": self.depth} if signals else {}
        with untracked.around(self, self.module):
            return self.module(self.as_published(x), **kwargs[self.letter], **extra)


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`; with `send_signal` both receive `_reverse` and `_depth`."""

    def __init__(self, f: nn.Module, g: nn.Module, depth: int | None = None, send_signal: bool = False) -> None:
        branches = _ReformerBranch("f", 0, (1,), FEATURES), _ReformerBranch("g", 1, (0,))
        super().__init__(*branches, f=f, g=g)
        for branch in branches:
            branch.depth = depth
        self.depth = depth
        self.send_signal = send_signal


class IrreversibleBlock(PlainBlock):
    """The irreversible version, on a tensor that holds both streams."""

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
        reverses = x.shape[1] > self.reverse_thres
        drops = self.training and self.layer_dropout > 0
        outputs = self.run(
            x,
            memory=None if reverses else "store",
            signals=self.send_signal and (reverses or drops),
            untracked=UntrackedState("after", silent=CALLBACKS),
            kwargs=by_letter(arg_route, kwargs),
        )
        return torch.cat(outputs, dim=FEATURES)
