"""Recomputing from streams that were saved before the steps. See NOTE [Rules of the tape]."""

from __future__ import annotations

from collections.abc import Callable

from retrograde.network.streams import Streams

from .call import Call
from .capture import Capture
from .saved_streams import KeepsStreams, SavedStreams
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
            stop_at = saves if i == last and traits.repeats else -1  # not before it was seen to repeat to its end
            captures.append(Capture(i, first, first + saves, record, stop_at))
            streams = self.redo(record, streams, captures[-1])
            traits.repeats = True
        return captures
