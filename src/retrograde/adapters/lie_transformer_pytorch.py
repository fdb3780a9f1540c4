"""In the place of `lie_transformer_pytorch.reversible` (lie-transformer-pytorch 0.0.17).

The state is a tuple (coords, values, mask, edges). Values are the stream; the rest is context,
with gradients to coords and edges, and comes back as it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from retrograde._sequence import ReversibleSequence as EngineSequence
from retrograde._step import Step

from ._dropin import Branch, PublishedBlock, branches_of, named
from ._dropin import Deterministic as Deterministic
from ._notes import Notes

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
        kwargs: dict[str, Any],
        notes: Notes,
    ) -> Any:
        with notes.around(self, self.module):
            return self.module((coords, self.seen(values), mask, edges), **kwargs)[VALUES]


class ReversibleBlock(PublishedBlock):
    """`0 += f(1)`, then `1 += g(0)`; f and g take and return the whole state."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__(
            Step(_LieBranch("f", -1), 0, (1,), takes=_takes("f"), name=named("f", f)),
            Step(_LieBranch("g"), 1, (0,), takes=_takes("g"), name=named("g", g)),
            f=f,
            g=g,
        )


def _takes(letter: str) -> dict[str, str]:
    return {"kwargs": f"{letter}_args", **{name: name for name in ("coords", "mask", "edges", "notes")}}


class ReversibleSequence(EngineSequence):
    """The state → the state with the mean of the streams in the place of its values."""

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
            f_args=dict(f_args or {}),
            g_args=dict(g_args or {}),
            notes=Notes(),
        )
        return coords, (first + second) * 0.5, mask, edges


class SequentialSequence(nn.Module):
    """The irreversible twin: `values += f(state)`, then `values += g(state)`."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        branches_of(blocks, "fg")
        self.blocks = blocks

    def forward(self, x: State) -> State:
        for branches in branches_of(self.blocks, "fg"):
            for branch in branches:
                given, after = x[VALUES], list(branch(x))
                after[VALUES] = (after[VALUES] + given).to(after[VALUES].dtype)  # the published sum is in place
                x = (after[0], after[1], after[2], after[3])
        return x
