"""What one call wrote down of one step: no activation, unless the step cannot be run again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from retrograde.network.block import Block, BoundStep

from .branch_state import BranchState
from .context import RecordedContext
from .step_cache import CachedReplay


class RetainedStep:
    """A step that cannot be run again: what it saved, and its target before and after."""

    __slots__ = ("after", "before", "tensors")

    def __init__(self, tensors: list[Tensor], before: Tensor, after: Tensor) -> None:
        self.tensors = [t.detach() for t in tensors]
        self.before = before.detach()
        self.after = after.detach()


class StepRecord:
    """The first run of one step. What most steps do not have is in the class, and not written for each of them.

    Attributes:
        weights: the versions of the branch's parameters before the run.
        versions: those of the tensors that it saved, whose shapes and dtypes are in `saved`.
        branch_saves: how many of them the branch saved; the coupling saved the others.
        same: sources and context that were one tensor with a source before them.
        context: the context as the branch got it, if it may change.
        side_bits: what the coupling forgets of its target.
        graphs: which graphs ran, of parts that the user compiled.
        is_selective: whether the first run was to save results for the replay; `saved_results` has them.
    """

    versions: Sequence[int] = ()
    saved: Any = None
    branch_saves = 0
    same: Sequence[tuple[int | str, int]] = ()
    context: RecordedContext | None = None
    side_bits: Tensor | None = None
    decisions: list[tuple[Tensor, int]] | None = None
    graphs: Sequence[int] = ()
    is_selective = False
    saved_results: AbstractContextManager[Any] | None = None
    retained: RetainedStep | None = None

    def __init__(
        self, block: Block, index: int, bound: BoundStep, cached: CachedReplay, state: BranchState, weights: list[int]
    ) -> None:
        self.block = block
        self.index = index
        self.bound = bound
        self.cached = cached
        self.state = state
        self.weights = weights
