"""The engine: activations recomputed when autograd asks for them.

NOTE [Rules of the tape]
 The branches run forward in ordinary autograd. Saved-tensor hooks give autograd a small handle
 in the place of each tensor it would keep. When backward first asks a step for a tensor, the
 tape recomputes that step's input, runs the branch again and serves the handles from that run.
 The graph that backward walks is the ordinary one.

 1. A call owns its tapes. Nothing of a call is stored on a module: two calls, two threads,
    nested stacks and m(m(x)) are independent.
 2. The last streams and the context are saved as autograd saves any tensor: an edit in place
    is detected, and hooks of an outer tape or checkpoint apply to them.
 3. Recomputing starts from the nearest state at hand: the streams recomputed last, an anchor, or the
    last streams. So a loss on an intermediate output works, and so do partial backward passes.
 4. A recomputed tensor is handed over when autograd asks for it, and the rest of a step's are
    dropped before the step before it is recomputed. The last streams are dropped when a backward
    pass that does not keep the graph has left them; a step that is asked for after that is
    reached by running forward. Peak memory is the streams, their gradients and one branch's graph.
 5. The last step of a call keeps its graph: the peak includes one step's graph anyway.
 6. A replay that saves other tensors than the first run did (in number, shape or dtype) is an error.
 7. Without grad mode there is no tape.
 8. No reference cycle: saved streams are detached, a handle is a number, and what a step
    saved is forgotten when its forward ends, even by an exception.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrograde.network.step import StepError
from retrograde.network.streams import Streams, replaced

from .call import Call
from .capture import Capture, unedited
from .decisions import Decisions
from .step_record import StepRecord
from .step_run import make_pack_hook, replay


class Tape:
    """Records consecutive steps and serves their saved tensors. See NOTE [Rules of the tape].

    A subclass says in `recompute` how a step's input is found again.

    Args:
        call: what the tapes of one call share.
        steps: how many steps to record; a further one keeps its graph (rule 5).
    """

    is_selective = False  # whether results inside of branches are saved for the replay
    spans_blocks = True  # whether nothing may change the streams between its blocks, and after the last

    def __init__(self, call: Call, steps: int) -> None:
        self.call = call
        self.steps = steps
        self.records: list[StepRecord] = []
        self.first_handles: list[int] = []  # of each record
        self.next_handle = 0  # the first that no record has
        self.pending: list[Tensor] = []  # what the step that runs now has saved
        self.pending_versions: list[int] = []
        self.decisions = Decisions()
        self.block: Any = None  # the block that runs now
        self.index = 0  # its number in the stack
        self.streams: Streams = ()  # after the last step that ran
        self._filled: dict[int, Capture] = {}
        self._serving: Capture | None = None
        self._outside: dict[int, tuple[Tensor, int]] = {}  # what hooks between two steps saved: not ours to recompute
        self._lock = threading.RLock()
        self.hooks: saved_tensors_hooks | None = None  # while it records

    def __enter__(self) -> Tape:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def open(self, streams: Streams) -> None:
        """Begin the recording with these streams."""
        self.begin(streams)
        self.hooks = saved_tensors_hooks(make_pack_hook(self.pending, self.pending_versions), self._unpack)
        self.hooks.__enter__()

    def begin(self, streams: Streams) -> None:
        """Called with the streams before the first recorded step."""

    def end(self, streams: Streams) -> None:
        """Called with the streams after the last recorded step."""

    def close(self, streams: Streams) -> None:
        """End the recording. May be called again."""
        if self.hooks is not None:
            self.leave()
            self.end(streams)

    def leave(self) -> None:
        """Take the hooks off; done by `close`, and where an exception ends the call."""
        self.flush()
        hooks, self.hooks = self.hooks, None
        self.streams, self.block = (), None  # whose graph holds this tape
        if hooks is not None:
            hooks.__exit__()

    def flush(self) -> None:
        """Put aside what was saved between two steps."""
        for tensor, version in zip(self.pending, self.pending_versions, strict=True):
            self._outside[self.next_handle] = tensor.detach(), version
            self.next_handle += 1
        self.pending.clear()
        self.pending_versions.clear()

    def verify(self, record: StepRecord, target: Tensor, update: Any) -> None:
        """See that a step can be recomputed; called in its first run."""

    def recompute(self, index: int) -> list[Capture]:
        """Run a step again, and others if they come with it: what they saved."""
        raise NotImplementedError

    def redo(self, record: StepRecord, streams: Streams, capture: Capture | None) -> Streams:
        """Run one step forward again, and return the streams after it."""
        if record.retained is not None:
            after = record.retained.after
        else:
            after = replay(record, streams, self.call, capture, "redo")
        streams = replaced(streams, record.bound.target, after)
        return record.block.reorder(streams) if record.bound.ends_block else streams

    def _unpack(self, handle: int) -> Tensor:
        capture = self._serving
        if capture is None or not capture.first <= handle < capture.end:
            return self._unpack_elsewhere(handle)
        position = handle - capture.first
        tensor: Tensor | None = capture.tensors[position]
        if tensor is None:  # asked for twice: a node that reads its saved tensors again
            return self._serve(capture.index, position, is_reread=True)
        if not capture.is_reread:
            capture.tensors[position] = None
        return tensor if tensor._version == capture.versions[position] else unedited(tensor, -1)

    def _unpack_elsewhere(self, handle: int) -> Tensor:
        """Serve a tensor of another step than the last one served."""
        if handle in self._outside:
            return unedited(*self._outside[handle])
        if handle >= self.next_handle:  # a branch that differentiates in its forward
            position = handle - self.next_handle
            return unedited(self.pending[position], self.pending_versions[position])
        index = bisect_right(self.first_handles, handle) - 1
        record, position = self.records[index], handle - self.first_handles[index]
        if record.retained is not None:
            return unedited(record.retained.tensors[position], record.versions[position])
        return self._serve(index, position, is_reread=False)

    def _serve(self, index: int, position: int, *, is_reread: bool) -> Tensor:
        with self._lock:
            if is_reread or index not in self._filled:
                self._filled = {}
                self._serving = None
                self._filled = {capture.index: capture for capture in self.recompute(index)}
            capture = self._serving = self._filled[index]
            capture.is_reread = capture.is_reread or is_reread
            tensor: Tensor | None = capture.tensors[position]
            if tensor is None:  # a block that is recomputed as a whole was served before
                return self._serve(index, position, is_reread=True)
            if not capture.is_reread:
                capture.tensors[position] = None
            return tensor if tensor._version == capture.versions[position] else unedited(tensor, -1)

    def check_unchanged(self, given: Streams, where: str) -> None:
        """Raise if something changed a stream between two steps, of which the inverse would not know."""
        for i, (before, now) in enumerate(zip(self.streams, given, strict=True)):
            if now is before:
                continue
            place = f"{where} block {self.index} [{self.block.describe()}]"
            if now.dtype != before.dtype:
                option = "output_dtype=None" if where == "after" else "cast_forward_inputs=False"
                raise StepError(
                    f"Stream {i} was turned from {before.dtype} into {now.dtype} {place}, which no inverse can undo. "
                    f"Under FSDP2 use MixedPrecisionPolicy({option}) for blocks; branches may cast as they like."
                )
            if now.shape != before.shape or now.data_ptr() != before.data_ptr():
                raise StepError(
                    f"Stream {i} was exchanged {place}, perhaps by a forward hook on a block. The inverse cannot know "
                    "of it: make the change a step, or give the block memory='store'."
                )
