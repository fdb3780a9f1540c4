"""Rebuilding by inversion: from the streams after a step to those before it. See NOTE [Rules of the tape]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ._block import Block, replaced
from ._record import Call, Capture, Kept, Record, leaf, rerun
from ._step import StepError
from ._streams import Streams
from ._tape import Losses, Tape, check_untouched
from ._torch_private import has_forward_hooks, keeps_graph, set_grad_enabled, versions


class Probe(Protocol):
    """Sees the streams before a block when they have been rebuilt, and says with which to go on."""

    def rebuilt(self, streams: Streams) -> Streams: ...


class ReverseTape(Tape):
    """Keeps the streams after its steps, and walks back by inverting them.

    Args:
        partial: whether each branch keeps some of its results for its replay.
    """

    _end: Kept | None = None
    _anchor: Kept | None = None
    _state: Streams = ()
    _position: int = -1  # the streams in _state are those before the step of this number
    _probes: dict[int, Probe] | None = None

    def __init__(self, call: Call, steps: int, *, partial: bool = False) -> None:
        super().__init__(call, steps)
        self._partial = partial

    def anchor(self, streams: Streams) -> None:
        """Keep the streams before the first step, which the tape before this one ends with: they need no rebuilding."""
        self._anchor = Kept(tuple(s.detach() for s in streams))

    def watch(self, probe: Probe | None) -> None:
        """Have `probe` see the streams that the next block is given, when they are rebuilt."""
        if probe is not None:
            self._probes = {**(self._probes or {}), len(self.records): probe}

    def run(self, block: Block, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Losses]:
        given, before = streams, versions(streams)
        streams, losses = super().run(block, streams, context)
        if self._hooks is not None and has_forward_hooks(block):
            check_untouched(block.reorder(self._streams), streams, f"after the block [{block.describe()}]")
            if versions(given) != before:
                raise StepError(
                    f"A hook on the block [{block.describe()}] edited a stream in place, of which the inverse cannot "
                    "know: make the change a step, or give the block memory='store'."
                )
        return streams, losses

    def close(self, streams: Streams) -> None:
        if self._hooks is not None:
            self.leave()
            self._end = Kept(tuple(s.detach() for s in streams))

    def _verify(self, record: Record, target: Tensor, update: Any) -> None:
        step, habits = record.wire.step, record.form.habits
        if step.forgets:
            record.side = step.coupling.side(target)
        if not habits.verified:
            if not type(step.coupling).__module__.startswith("retrograde."):
                step.check_inverse(target, update)
            habits.verified = True

    def _rebuild(self, index: int) -> None:
        if index == 0 and self._anchor is not None:
            self._state, self._position = self._anchor.tensors(), 0
        elif self._position < index and self._end is not None:
            self._state, self._position = self._end.tensors(), len(self.records)
        if not keeps_graph():  # rule 4; should a later step be asked for all the same, the way up to it is below
            self._end = None
            self._anchor = self._anchor if index else None
        while self._position < index:
            self._state = self._redo(self.records[self._position], self._state, None)
            self._position += 1
        while self._position > index + 1:
            self._undo(None)
        capture = Capture(index, self._firsts[index], self.records[index])
        if self._position == index:  # its input is known: run it once more
            self._redo(self.records[index], self._state, capture)
        else:
            self._undo(capture)
        self._filled[index] = capture

    def _undo(self, capture: Capture | None) -> None:
        """Move the known state from after a step to before it."""
        index = self._position - 1
        record = self.records[index]
        target, coupling = record.wire.target, record.form.coupling  # of the first run: the step may have another now
        state = self._state
        if record.wire.ends_block and record.block.order is not None:
            state = record.block.restore_order(state)
        if record.stayed is not None:
            self._state, self._position = replaced(state, target, record.stayed.before), index
            return
        start = record.start(state)
        result: list[Tensor] = []

        def separate(update: Any) -> None:
            set_grad_enabled(False)
            try:
                if record.side is None:
                    before = coupling.separate(state[target], update)
                else:
                    before = coupling.separate(state[target], update, record.side)
            finally:
                set_grad_enabled(True)
            if before.stride() != record.form.stride:
                before = _laid_out(record.form.stride, before)
            result.append(before)
            if capture is not None and record.branch_saves < len(record.versions):
                with capture:  # for what the coupling saves
                    coupling.combine(leaf(before, record.form.requires[target]), update)

        rerun(record, start, self.call, capture, separate)
        if capture is not None:
            capture.check((*start, *result))
        self._state, self._position = replaced(state, target, result[0]), index
        if self._probes is not None and index in self._probes:
            self._state = self._probes[index].rebuilt(self._state)


def _laid_out(stride: tuple[int, ...], tensor: Tensor) -> Tensor:
    """The tensor in the memory layout of the first run: kernels give other bits for another one."""
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
