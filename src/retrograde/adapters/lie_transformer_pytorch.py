"""The drop-in for `lie_transformer_pytorch.reversible` (lie-transformer-pytorch 0.0.17).

The state is a tuple (coords, values, mask, edges). Values are the stream; the rest is context,
with gradients to coords and edges, and is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from retrograde.sequence import ReversibleSequence as EngineSequence

from ._dropin import Branch, PublishedBlock, branches_of
from ._dropin import Deterministic as Deterministic
from ._untracked_state import UntrackedState

State = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
VALUES = 1


class _LieBranch(Branch):
    def __call__(
        self,
        values: Tensor,
        *,
        coords: Tensor,
        mask: Tensor | None,
        edges: Tensor | None,
        kwargs: Mapping[str, Mapping[str, Any]],
        untracked: UntrackedState,
    ) -> Any:
        with untracked.around(self, self.module):
            return self.module((coords, self.as_published(values), mask, edges), **kwargs[self.letter])[VALUES]


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`; f and g take and return the whole state."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__(_LieBranch("f", 0, (1,), dim=-1), _LieBranch("g", 1, (0,)), f=f, g=g)


class ReversibleSequence(EngineSequence):
    """The state → the state with the mean of the streams as its values."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        super().__init__([ReversibleBlock(f, g) for f, g in branches_of(blocks, "fg")], merge=None)

    def forward(  # type: ignore[override]
        self, x: State, f_args: Mapping[str, Any] | None = None, g_args: Mapping[str, Any] | None = None
    ) -> State:
        if len(x) != 4:
            raise ValueError(f"The state is a tuple (coords, values, mask, edges), not one of {len(x)} entries.")
        coords, values, mask, edges = x
        first, second = self.run(
            values,
            coords=coords,
            mask=mask,
            edges=edges,
            kwargs={"f": dict(f_args or {}), "g": dict(g_args or {})},
            untracked=UntrackedState(),
        )
        return coords, (first + second) * 0.5, mask, edges


class SequentialSequence(nn.Module):
    """The irreversible version: `values += f(state)`, then `values += g(state)`."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        branches_of(blocks, "fg")
        self.blocks = blocks

    def forward(self, x: State) -> State:
        for branches in branches_of(self.blocks, "fg"):
            for branch in branches:
                before, after = x[VALUES], list(branch(x))
                after[VALUES] = (after[VALUES] + before).to(after[VALUES].dtype)  # the published sum is in place
                x = (after[0], after[1], after[2], after[3])
        return x
