"""The engine: activations rebuilt when autograd asks for them.

NOTE [Rules of the tape]
 The branches run forward in ordinary autograd. Saved-tensor hooks hand autograd a small handle
 in the place of each tensor it would keep. When backward first asks a step for a tensor, the
 tape rebuilds that step's input, runs the branch again and serves the handles from that run.
 The graph that backward walks is the ordinary one.

 1. A call owns its tapes. Nothing of a call is stored on a module: two calls, two threads,
    nested stacks and m(m(x)) are independent.
 2. The last streams and the context are kept as autograd keeps any tensor, by a node that saves
    them: an edit in place is detected, and hooks of an outer tape or checkpoint apply to them.
 3. Rebuilding walks from the nearest known state: the streams rebuilt last, or the last
    streams. So a loss on an intermediate output works, and so do partial backward passes.
 4. A rebuilt tensor is handed over when autograd asks for it, and the rest of a step's are
    dropped before the step before it is rebuilt. The last streams are dropped when a backward
    pass that does not keep the graph has left them; a step that is asked for after that is
    reached by running forward. Peak memory is the streams, their gradients and one branch's graph.
 5. The last step of a call keeps its graph: the peak holds one step's graph anyway.
 6. A replay that saves other tensors than the first run did (in number, shape or dtype) is an error.
 7. Without grad mode there is no tape.
 8. No reference cycle: kept tensors are detached, a handle is a number, and what a step
    saved is forgotten when its forward ends, even by an exception.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ._block import Block, Wire, advance, replaced
from ._decide import Decisions, begin, end
from ._habits import Known
from ._packing import packer
from ._partial import Keeping
from ._record import NOTHING, Call, Capture, Enough, Kept, Record, Stayed, leaf, rerun, unedited
from ._replay import TakingTurns
from ._step import Step, StepError, StreamName
from ._streams import Streams

Losses = tuple[Tensor, ...]


class Keeps(Protocol):
    """Something that keeps streams until they are asked for."""

    def tensors(self) -> Streams: ...


class Plain:
    """No tape: autograd keeps what it keeps. The memory mode "store", and every run without grad mode.

    In a call with tapes it takes turns with other threads, whose draws it might disturb.
    """

    def __init__(self, call: Call | None, names: tuple[StreamName, ...]) -> None:
        self._call = call
        self._names = names

    def run(self, block: Block, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Losses]:
        if self._call is None:
            result: tuple[Streams, Losses] = block(streams, context, advance, self._names)
            return result
        self._call.ambient.look_for_unseen()
        with TakingTurns():
            result = block(streams, context, advance, self._names)
            self._call.ambient.states = self._call.ambient.read()
        self._call.ambient.look_away()
        return result

    def close(self, streams: Streams) -> None:
        pass

    def leave(self) -> None:
        pass


class Tape:
    """Records consecutive steps and serves their saved tensors. See NOTE [Rules of the tape].

    Args:
        call: what the tapes of one call share.
        steps: how many steps to record; a further one keeps its graph (rule 5).
    """

    _partial = False  # whether results inside of branches are kept

    def __init__(self, call: Call, steps: int) -> None:
        self.call = call
        self.steps = steps
        self.records: list[Record] = []
        self._filled: dict[int, Capture] = {}
        self._serving: Capture | None = None
        self._lock = threading.RLock()
        self._hooks: saved_tensors_hooks | None = None
        self._block: Block | None = None
        self._streams: Streams = ()
        self._decisions = Decisions()
        self._pending: list[Tensor] = []  # what the step that runs now has saved
        self._versions: list[int] = []
        self._strays: dict[int, tuple[Tensor, int]] = {}  # what hooks between two steps saved: not ours to rebuild
        self._firsts: list[int] = []  # for each record, the first of its handles
        self._next = 0  # the first handle that no record has

    def run(self, block: Block, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Losses]:
        """Run one block forward under the tape."""
        if self._hooks is None and len(self.records) < self.steps:
            self._open(streams)
        self._block = block
        self._streams = streams
        result: tuple[Streams, Losses] = block(streams, context, self._advance, self.call.names)
        return result

    def close(self, streams: Streams) -> None:
        """End the recording. `streams` are those after the last recorded step."""
        self.leave()

    def leave(self) -> None:
        """Take the hooks off; done by `close`, and where an exception ends the call."""
        self._settle()
        hooks, self._hooks = self._hooks, None
        self._streams = ()
        self._block = None
        if hooks is not None:
            hooks.__exit__()

    def _open(self, streams: Streams) -> None:
        self._hooks = saved_tensors_hooks(packer(self._pending, self._versions), self._unpack)
        self._hooks.__enter__()

    def _advance(self, wire: Wire, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Tensor | None]:
        block = self._block
        assert block is not None
        if streams is not self._streams:
            check_untouched(self._streams, streams, f"before {wire.step.name}")
        if len(self.records) == self.steps:
            if self._hooks is not None:
                self.close(streams)
                self._block = block
            self.call.ambient.look_for_unseen()
            with TakingTurns():
                streams, aux = advance(wire, streams, context)
        else:
            streams, aux = self._record(block, wire, streams, context)
        self._streams = streams
        return streams, aux

    def _record(
        self, block: Block, wire: Wire, streams: Streams, context: Mapping[str, Any]
    ) -> tuple[Streams, Tensor | None]:
        """Run one step for the first time, with handles in the place of what autograd saves."""
        step, target, pending, ambient = wire.step, streams[wire.target], self._pending, self.call.ambient
        if pending:
            self._settle()
        learned = step.known or known(step)
        record = Record(block, wire, streams, learned)
        begin(self._decisions)
        try:
            if not record.form.is_steady:
                record.replay.begin(ambient, record.form.habits)
            sources = list(map(streams.__getitem__, wire.sources))
            kwargs = step.takes.select(context) if context else {}
            if kwargs or len(sources) > 1:
                record.note_same(sources, kwargs)
            if self._partial:
                update, aux = _update_keeping(record, target, sources, kwargs)
            else:
                update, aux = step.update(sources, kwargs)
            can_replay = record.end(ambient, learned)
            record.branch_saves = len(pending)
            after = step.combine(target, update)
            record.note_saved(pending, self._versions, learned)
            if self._decisions.taken:
                record.decisions, self._decisions = self._decisions.taken, Decisions()
            if not can_replay:
                record.stayed = Stayed(pending, target, after)
            if step.forgets or not record.form.habits.verified:
                self._verify(record, target, update)
        except RuntimeError as error:
            _refuse_gradients_of_functions(error, step)
            raise
        finally:
            if not record.form.is_steady:  # a steady one takes no lock
                record.replay.leave()
            end()
            first = self._next
            self._next = first + len(pending)
            pending.clear()
            self._versions.clear()
        self.records.append(record)
        self._firsts.append(first)
        return replaced(streams, wire.target, after), aux

    def _settle(self) -> None:
        """Put aside what was saved between two steps."""
        for tensor, seen in zip(self._pending, self._versions, strict=True):
            self._strays[self._next] = tensor.detach(), seen
            self._next += 1
        self._pending.clear()
        self._versions.clear()

    def _verify(self, record: Record, target: Tensor, update: Any) -> None:
        """A look at what a step did."""

    def _unpack(self, handle: int) -> Tensor:
        capture = self._serving
        if capture is None or not capture.first <= handle < capture.end:
            return self._unpack_elsewhere(handle)
        position = handle - capture.first
        tensor: Tensor | None = capture.tensors[position]
        if tensor is None:  # asked for twice: a node that reads its saved tensors again
            return self._serve(capture.index, position, clings=True)
        if not capture.clings:
            capture.tensors[position] = None
        return tensor if tensor._version == capture.versions[position] else unedited(tensor, -1)

    def _unpack_elsewhere(self, handle: int) -> Tensor:
        """Serve a tensor of another step than the last one served."""
        if handle in self._strays:
            return unedited(*self._strays[handle])
        if handle >= self._next:  # a branch that differentiates in its forward
            position = handle - self._next
            return unedited(self._pending[position], self._versions[position])
        index = bisect_right(self._firsts, handle) - 1
        record, position = self.records[index], handle - self._firsts[index]
        if record.stayed is not None:
            return unedited(record.stayed.tensors[position], record.versions[position])
        return self._serve(index, position, clings=False)

    def _serve(self, index: int, position: int, *, clings: bool) -> Tensor:
        with self._lock:
            if clings or index not in self._filled:
                self._filled = {}
                self._serving = None
                self._rebuild(index)
            capture = self._serving = self._filled[index]
            capture.clings = capture.clings or clings
            tensor: Tensor | None = capture.tensors[position]
            if tensor is None:  # a block that is rebuilt as a whole was served before
                return self._serve(index, position, clings=True)
            if not capture.clings:
                capture.tensors[position] = None
            return tensor

    def _redo(self, record: Record, streams: Streams, capture: Capture | None) -> Streams:
        """Run one step forward again, and return the streams after it."""
        after = record.stayed.after if record.stayed else self._combine_again(record, streams, capture)
        streams = replaced(streams, record.wire.target, after)
        return record.block.reorder(streams) if record.wire.ends_block else streams

    def _combine_again(self, record: Record, streams: Streams, capture: Capture | None) -> Tensor:
        target = record.wire.target
        start = record.start(streams)
        before = leaf(streams[target], record.form.requires[target])
        result: list[Tensor] = []

        def combine(update: Any) -> None:
            with capture or NOTHING:
                result.append(record.form.coupling.combine(before, update))

        try:
            rerun(record, start, self.call, capture, combine)
        except Enough:
            result.append(before)  # of no use: nothing comes after the last step
        if capture is not None:
            capture.check((*start, before))
        return result[0].detach()

    def _rebuild(self, index: int) -> None:
        """Fill in what a step saved."""
        raise NotImplementedError


class CheckpointTape(Tape):
    """Keeps the streams before its steps, and runs them forward again.

    Args:
        keep: how it keeps them.
    """

    def __init__(self, call: Call, steps: int, *, keep: Callable[[Streams], Keeps] = Kept) -> None:
        super().__init__(call, steps)
        self._keep = keep

    def _open(self, streams: Streams) -> None:
        self._start = self._keep(tuple(s.detach() for s in streams))
        super()._open(streams)

    def _rebuild(self, index: int) -> None:
        streams = self._start.tensors()
        filled: dict[int, Capture] = {}
        last = max(i for i, record in enumerate(self.records) if record.versions)
        for i, record in enumerate(self.records[: last + 1]):
            habits = record.form.habits
            stops = i == last and habits.repeats  # but not before the branch was seen to do the same to its end
            filled[i] = Capture(i, self._firsts[i], record, stops_at=len(record.versions) if stops else -1)
            streams = self._redo(record, streams, filled[i])
            habits.repeats = True
        self._filled = filled


def known(step: Step) -> Known:
    """What was learned of a step in earlier calls."""
    found: Known | None = step.known
    if found is None:
        found = step.known = Known()
    return found


def _update_keeping(record: Record, target: Tensor, sources: list[Tensor], kwargs: dict[str, Any]) -> Any:
    """The update of a step that keeps results for its replay. Where there were none to keep, it does not look again."""
    step, habits = record.wire.step, record.form.habits
    looked_for = str(step.keeps), target.shape, target.dtype
    if looked_for in habits.kept_nothing:
        return step.update(sources, kwargs)
    keeping = Keeping(step.keeps)
    with keeping.first:
        found = step.update(sources, kwargs)
    record.kept = True
    outcome = keeping.end()
    if outcome == "kept":
        record.taking = keeping.replay
    elif outcome == "nothing":
        habits.kept_nothing.add(looked_for)
    return found


def _refuse_gradients_of_functions(error: RuntimeError, step: Step) -> None:
    """Raise an error with the alternative, where torch objects to the hooks of a tape around torch.func."""
    if "don't yet support saved tensor hooks" in str(error):
        raise StepError(
            f"{step.name} uses torch.func.grad, vjp, jacrev or hessian, which torch forbids under the hooks of a tape. "
            "Use torch.autograd.grad(..., create_graph=True), or give the block memory='store'."
        ) from error


def check_untouched(expected: Streams, given: Streams, where: str) -> None:
    """Between two steps nothing may change a stream, or the inverse would not know of it."""
    for i, (before, now) in enumerate(zip(expected, given, strict=True)):
        if now is before:
            continue
        if now.dtype != before.dtype:
            option = "output_dtype=None" if where.startswith("after") else "cast_forward_inputs=False"
            raise StepError(
                f"Stream {i} was turned from {before.dtype} into {now.dtype} {where}, which no inverse can undo. Under "
                f"FSDP2 use MixedPrecisionPolicy({option}) for blocks; branches may cast as they like."
            )
        if now.shape != before.shape or now.data_ptr() != before.data_ptr():
            raise StepError(
                f"Stream {i} was exchanged {where}, perhaps by a forward hook on a block. The inverse cannot know of "
                "it: make the change a step, or give the block memory='store'."
            )
