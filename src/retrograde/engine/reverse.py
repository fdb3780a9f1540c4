"""Recomputing by inversion: from the streams after a step to those before it. See NOTE [Rules of the tape]."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from retrograde.network.streams import Streams

from .call import Call
from .capture import Capture
from .observer import Probe
from .saved_streams import SavedStreams
from .step_record import StepRecord
from .step_run import replay
from .tape import Tape
from .torch_internals import keeps_graph, load_compiler


class ReverseTape(Tape):
    """Saves the streams after its steps, and walks back by inverting them.

    Args:
        is_selective: whether each branch saves some of its results for its replay.
    """

    _end: SavedStreams | None = None
    _anchor: SavedStreams | None = None
    _state: Streams = ()
    _position: int = -1  # the streams in _state are those before the step of this number
    _probes: dict[int, Probe] | None = None

    def __init__(self, call: Call, steps: int, *, is_selective: bool = False) -> None:
        super().__init__(call, steps)
        self.is_selective = is_selective
        if is_selective:
            load_compiler()

    def anchor(self, streams: Streams) -> None:
        """Save the streams before the first step, which the tape before this one ends with: they are not recomputed."""
        self._anchor = SavedStreams(tuple(s.detach() for s in streams))

    def watch(self, probe: Probe | None) -> None:
        """Have `probe` see the streams that the next block is given, when they are recomputed."""
        if probe is not None:
            self._probes = {**(self._probes or {}), len(self.records): probe}

    def end(self, streams: Streams) -> None:
        self._end = SavedStreams(tuple(s.detach() for s in streams))

    def verify(self, record: StepRecord, target: Tensor, update: Any) -> None:
        step, traits = record.bound.step, record.cached.traits
        if step.has_side_bits:
            record.side_bits = step.coupling.side_bits(target)
        if not traits.verified:
            if not type(step.coupling).__module__.startswith("retrograde."):
                step.check_inverse(target, update)
            traits.verified = True

    def recompute(self, index: int) -> list[Capture]:
        if index == 0 and self._anchor is not None:
            self._state, self._position = self._anchor.tensors(), 0
        elif self._position < index and self._end is not None:
            self._state, self._position = self._end.tensors(), len(self.records)
        elif self._position < index and self.hooks is not None:
            self._state, self._position = self._latest(), len(self.records)
        if not keeps_graph():  # rule 4; should a later step be asked for all the same, the way up to it is below
            self._end = None
            self._anchor = self._anchor if index else None
        while self._position < index:
            self._state = self.redo(self.records[self._position], self._state, None)
            self._position += 1
        while self._position > index + 1:
            self._undo(None)
        record = self.records[index]
        capture = Capture(index, self.first_handles[index], record)
        capture.is_numbered = index in self.differentiating
        if self._position == index:  # its input is at hand: run it once more
            self.redo(record, self._state, capture)
        else:
            self._undo(capture)
        return [capture]

    def _latest(self) -> Streams:
        """The streams after the last step that ran, for a backward pass in the middle of the call (in a hook)."""
        streams, last = tuple(s.detach() for s in self.streams), self.records[-1]
        return last.block.reorder(streams) if last.bound.ends_block else streams

    def _undo(self, capture: Capture | None) -> None:
        """Move the state from after a step to before it."""
        index = self._position - 1
        record, state = self.records[index], self._state
        if record.bound.ends_block and record.block.order is not None:
            state = record.block.restore_order(state)
        if record.retained is not None:
            before = record.retained.before
        else:
            before = replay(record, state, self.call, capture, "undo")
        target = record.bound.target
        self._state, self._position = (*state[:target], before, *state[target + 1 :]), index
        if self._probes is not None and index in self._probes and record.retained is None:
            self._state = self._probes[index].recomputed(self._state)
