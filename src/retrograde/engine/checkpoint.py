"""Recomputing from streams that were saved before the steps. See NOTE [Rules of the tape]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograde.network.streams import Streams

from . import rng
from .call import Call
from .capture import Capture
from .saved_streams import KeepsStreams, SavedStreams
from .step_record import StepRecord
from .tape import Tape


class CheckpointTape(Tape):
    """Saves the streams before its steps, and runs them forward again. For one block: hooks may change what it returns.

    Args:
        keep: how it keeps the streams.
    """

    spans_blocks = False

    def __init__(self, call: Call, steps: int, *, keep: Callable[[Streams], KeepsStreams] = SavedStreams) -> None:
        super().__init__(call, steps)
        self._keep = keep

    def begin(self, streams: Streams) -> None:
        self._start = self._keep(tuple(s.detach() for s in streams))

    def recompute(self, index: int) -> list[Capture]:
        streams = self._start.tensors()
        captures: list[Capture] = []
        last = max(i for i, record in enumerate(self.records) if record.versions)
        for i, record in enumerate(self.records[: last + 1]):
            traits = record.cached.traits
            first, saves = self.first_handles[i], len(record.versions)
            may_stop = i == last and traits.may_stop and self.call.observer is None
            saved = _Saved(record) if i == last and not may_stop else []
            captures.append(Capture(i, first, first + saves, record, saves if may_stop else -1, tensors=saved))
            streams = self.redo(record, streams, captures[-1])
            if isinstance(saved, _Saved):  # seen to repeat to its end
                traits.may_stop = saved.had_drawn
        return captures


class _Saved(list[Any]):
    """What the last step saves; and whether, when it saved the last tensor, it had drawn all its random numbers.

    An operator may fill a tensor with random numbers after it was saved (RReLU does): a replay that stopped
    there would leave it empty.
    """

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._saves = len(record.versions)
        self._drawn = record.state.drawn
        self.had_drawn = False

    def append(self, tensor: Any) -> None:
        super().append(tensor)
        if len(self) == self._saves:
            self.had_drawn = all(rng.read(generator) == after for generator, _, after in self._drawn)
