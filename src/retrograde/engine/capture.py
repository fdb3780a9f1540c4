"""What a replay saves, compared with what the first run saved; and the errors where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .saved_streams import edited_in_place
from .step_record import StepRecord
from .torch_internals import last_graphs

signature = attrgetter("shape", "dtype")
"""What of a saved tensor is the same in every run. To another device autograd itself objects."""


class StopReplay(BaseException):
    """Ends a replay as soon as all that was asked for is there. Not an Exception: no branch is to catch it."""


class Capture:
    """The tensors that a replay saves, to be handed to autograd in the place of those that the first run saved.

    Attributes:
        index: the step's number on its tape.
        first: the first of the handles that it serves; `end` is behind the last.
        pack: the hook that fills it, if it is not the ordinary one.
        is_reread: whether tensors stay after they were handed out: a node reads its saved tensors a second time.
    """

    pack: Callable[[Tensor], int] | None = None
    is_reread = False

    def __init__(self, index: int, first: int, record: StepRecord) -> None:
        self.index = index
        self.first = first
        self.end = first + len(record.versions)
        self.record = record
        self.tensors: list[Any] = []
        self.versions: list[int] = []

    def unpack(self, position: int) -> Tensor:
        """For a branch that differentiates in its forward."""
        return unedited(self.tensors[position], self.versions[position])

    def check(self, recomputed: Sequence[Tensor]) -> None:
        """Raise if the replay saved other tensors (rule 6), or somebody edited one in between."""
        tensors, record = self.tensors, self.record
        saves_others = list(map(signature, tensors)) != record.saved
        may_differ = record.graphs and (saves_others or record.bound.step.exact)
        if may_differ and record.graphs != last_graphs(record.cached.compiled):
            raise another_graph(record)
        if saves_others:
            raise replay_mismatch(record, self._difference())
        ours = (*recomputed, *record.state.introduced)  # whose versions start anew
        for tensor, now, then in zip(tensors, self.versions, record.versions, strict=True):
            if now != then and not any(_share_storage(tensor, other) for other in ours if other is not None):
                raise edited_in_place(f"a tensor of shape {tuple(tensor.shape)} that {record.bound.step.name} uses")

    def _difference(self) -> str:
        tensors, saved = self.tensors, self.record.saved
        for i, (tensor, (shape, dtype)) in enumerate(zip(tensors, saved, strict=False)):
            if tensor.shape != shape or tensor.dtype != dtype:
                return (
                    f"saved another tensor at position {i} than its first run: {tuple(tensor.shape)} {tensor.dtype} "
                    f"for {tuple(shape)} {dtype}"
                )
        return f"saved {len(tensors)} tensors, where its first run saved {len(saved)}"


def unedited(tensor: Tensor, expected: int) -> Tensor:
    """The tensor, if nobody edited it since its version was as expected."""
    if tensor._version != expected:
        raise edited_in_place(f"a tensor of shape {tuple(tensor.shape)} inside a branch")
    return tensor


def replay_mismatch(record: StepRecord, difference: str) -> RuntimeError:
    """The error for a replay that did something else than the first run."""
    return RuntimeError(
        f"The replay of {record.bound.step.name} in block {record.index} {difference}. A branch must "
        "do the same each time it runs: look for state kept outside of buffers, data that changed in between, or "
        "control flow that depends on either. If it decides by comparing (top-k routing), rounding in a recomputed "
        "stream may have flipped a decision: retrograde.decide() reuses the first one, memory='checkpoint' recomputes "
        "without rounding. retrograde.is_replaying() tells the runs apart, and memory='store' avoids the replay."
    )


def another_graph(record: StepRecord) -> RuntimeError:
    """The error for a compiled part of a branch that ran another graph in the replay, with other bits."""
    return RuntimeError(
        f"The replay of {record.bound.step.name} in block {record.index} ran another compiled graph than its first "
        "run, whose bits may differ: since then, a call with another sequence length had the compiler make a graph "
        "for any length, which it prefers from then on. Compile the branch with torch.compile(..., dynamic=True), "
        "which makes this graph at once; or call the backward pass before the next length; or compile the whole "
        'model with torch.compile(model, backend="retrograde").'
    )


def _share_storage(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a is b
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
