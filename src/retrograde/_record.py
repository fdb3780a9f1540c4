"""What a tape writes down of a call and of its steps, and how a step is run a second time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ._block import Block, Wire
from ._decide import Decisions, begin, end
from ._habits import Known
from ._replay import Ambient, Replay, Replaying, edited_in_place
from ._step import StreamName
from ._streams import Streams
from ._torch_private import (
    has_forward_hooks,
    inside_function_transform,
    outside_function_transforms,
    tree_flatten,
    tree_unflatten,
    versions,
)


class _Keep(torch.autograd.Function):
    """A node that only saves tensors. It belongs to no graph, so that it cannot be part of a cycle."""

    @staticmethod
    def forward(ctx: Any, spark: Tensor, tensors: Streams) -> Tensor:
        ctx.save_for_backward(*tensors)
        return spark.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("a node that only keeps tensors was walked")


_SPARK = torch.empty(0, requires_grad=True)


class Kept:
    """Tensors kept as autograd keeps its own: edits in place are detected, outer hooks apply.

    They must be detached from any graph: aliases with the same storage and version counter. The node's output is
    held too: in torch 2.6 a node frees what it saved when its output goes.
    """

    __slots__ = ("_output", "_unpacked", "_versions")

    def __init__(self, tensors: Streams) -> None:
        with torch.enable_grad():
            self._output: Any = _Keep.apply(_SPARK, tensors)  # type: ignore[no-untyped-call]
        self._unpacked: Streams | None = None
        self._versions: list[int] = []

    def tensors(self) -> Streams:
        """The tensors. They are unpacked once: torch.utils.checkpoint, if it is around us, allows no second time."""
        if self._unpacked is None:
            self._unpacked = self._output.grad_fn.saved_tensors
            self._versions = versions(self._unpacked)
        elif versions(self._unpacked) != self._versions:
            raise edited_in_place("a stream or a tensor of the context")
        return self._unpacked


def leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same storage and version counter, as the start of a new graph."""
    detached = tensor.detach()
    return detached.requires_grad_() if requires_grad else detached


class Call:
    """What the tapes of one call share: its streams' names, its context and its ambient state."""

    __slots__ = ("_is_empty", "_kept", "_leaves", "_spec", "_tensors", "ambient", "names")

    def __init__(self, names: tuple[StreamName, ...], streams: Streams, context: Mapping[str, Any]) -> None:
        self.names = names
        self._is_empty = not context
        leaves, self._spec = tree_flatten(dict(context))
        self._tensors = [i for i, value in enumerate(leaves) if isinstance(value, Tensor)]
        kept = tuple(leaves[i] for i in self._tensors)
        self._leaves = [None if isinstance(value, Tensor) else value for value in leaves]
        self._kept = Kept(tuple(leaf(t, t.requires_grad) for t in kept)) if kept else None
        devices = dict.fromkeys(t.device for t in (*streams, *kept))
        self.ambient = Ambient(list(devices), self._leaves)

    def context(self) -> Mapping[str, Any]:
        """The context as the first run had it, without its producer's graph."""
        if self._is_empty:
            return {}
        leaves = list(self._leaves)
        if self._kept is not None:
            for i, tensor in zip(self._tensors, self._kept.tensors(), strict=True):
                leaves[i] = tensor
        context: Mapping[str, Any] = tree_unflatten(leaves, self._spec)
        return context


class Record:
    """What the first run of one step leaves behind: no activation, unless it had to stay."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]

    __slots__ = ("block", "branch_saves", "decisions", "dtypes", "habits", "replay", "requires", "shapes", "side",
                 "stayed", "stride", "taking", "versions", "wire")  # fmt: skip

    def __init__(self, block: Block, wire: Wire, streams: Streams, known: Known) -> None:
        self.block = block
        self.wire = wire
        self.requires = known.same("streams", [s.requires_grad for s in streams])
        self.stride = streams[wire.target].stride()
        self.replay = Replay(wire.step.branch, wire.step.coupling, known)
        self.habits = known.habits(self.replay.survey.training)
        self.versions: list[int] = []  # of the saved tensors
        self.branch_saves = 0
        self.side: Tensor | None = None  # what the coupling forgets of its target
        self.decisions: list[tuple[Tensor, int]] | None = None
        self.taking: AbstractContextManager[Any] | None = None  # for one replay: it takes results that were kept
        self.stayed: Stayed | None = None

    def note_saved(self, tensors: list[Tensor], versions: list[int], known: Known) -> None:
        """Note what the first run saved."""
        self.versions = known.same("saved versions", versions.copy())
        self.shapes = known.same("saved shapes", [t.shape for t in tensors])
        self.dtypes = known.same("saved dtypes", [t.dtype for t in tensors])

    def start(self, streams: Streams) -> list[Tensor]:
        """The streams to replay the step on: detached, its sources requiring grad where they did before."""
        found = list(streams)
        for i in self.wire.sources:
            found[i] = leaf(found[i], self.requires[i])
        return found


class Stayed:
    """A step that cannot be run again: what it saved, and its target before and after."""

    __slots__ = ("after", "before", "tensors")

    def __init__(self, tensors: list[Tensor], before: Tensor, after: Tensor) -> None:
        self.tensors = [t.detach() for t in tensors]
        self.before = before.detach()
        self.after = after.detach()


Pack = Callable[[Tensor], int]


def packer(tensors: list[Tensor], versions: list[int]) -> Pack:
    """A hook that keeps what autograd saves in `tensors`, and hands autograd a number, counted from 0.

    It runs for every saved tensor: it looks up nothing, and numbers do not concern the garbage collector.
    """
    keep, note, number = tensors.append, versions.append, itertools.count().__next__

    def pack(tensor: Tensor) -> int:
        keep(tensor)
        note(tensor._version)
        return number()

    return pack


def unedited(tensor: Tensor, expected: int) -> Tensor:
    """The tensor, if nobody edited it since its version was as expected."""
    if tensor._version != expected:
        raise edited_in_place(f"a tensor of shape {tuple(tensor.shape)} inside a branch")
    return tensor


class Enough(BaseException):
    """Ends a replay as soon as all that was asked for is there. Not an Exception: no branch is to catch it."""


class Capture:
    """Collects what a replay saves, and holds it against what the first run saved (rule 6).

    Shape and dtype are compared; to another device autograd itself objects.
    """

    __slots__ = ("clings", "end", "first", "index", "record", "stops_at", "tensors", "versions")

    def __init__(self, index: int, first: int, record: Record, *, stops_at: int = -1) -> None:
        self.index = index
        self.first = first  # of the handles that it serves; `end` is behind the last
        self.end = first + len(record.versions)
        self.record = record
        self.stops_at = stops_at
        self.clings = False
        self.tensors: list[Any] = []
        self.versions: list[int] = []

    def hooks(self) -> saved_tensors_hooks:
        """Hooks that collect what autograd saves."""
        pack = packer(self.tensors, self.versions)

        def pack_detached(tensor: Tensor) -> int:  # a tensor with its graph would keep the replay's streams alive
            return pack(tensor if tensor.is_leaf else tensor.detach())

        def pack_or_stop(tensor: Tensor) -> int:
            handle = pack_detached(tensor)
            if handle + 1 == self.stops_at:
                raise Enough
            return handle

        return saved_tensors_hooks(pack_detached if self.stops_at < 0 else pack_or_stop, self._unpack)

    def _unpack(self, position: int) -> Tensor:
        return unedited(self.tensors[position], self.versions[position])

    def check(self, rebuilt: Sequence[Tensor]) -> None:
        """After the replay: nothing is missing, and nobody edited a tensor in between."""
        tensors, record = self.tensors, self.record
        if [t.shape for t in tensors] != record.shapes or [t.dtype for t in tensors] != record.dtypes:
            raise _mismatch(record, self._difference())
        if self.versions != record.versions:
            self._check_edits(rebuilt)

    def _difference(self) -> str:
        record, tensors = self.record, self.tensors
        for i, (tensor, shape, dtype) in enumerate(zip(tensors, record.shapes, record.dtypes, strict=False)):
            if tensor.shape != shape or tensor.dtype != dtype:
                return (
                    f"saved another tensor at position {i} than its first run: {tuple(tensor.shape)} {tensor.dtype} "
                    f"for {tuple(shape)} {dtype}"
                )
        return f"saved {len(tensors)} tensors, where its first run saved {len(record.shapes)}"

    def _check_edits(self, rebuilt: Sequence[Tensor]) -> None:
        """The version of a rebuilt tensor starts anew; any other version that differs tells of an edit."""
        record = self.record
        ours = (*rebuilt, *record.replay.introduced)
        for tensor, now, then in zip(self.tensors, self.versions, record.versions, strict=True):
            if now != then and not any(_share_storage(tensor, other) for other in ours if other is not None):
                raise edited_in_place(f"a tensor of shape {tuple(tensor.shape)} that {record.wire.step.name} uses")


Then = Callable[[Any], None]
"""What is done with the update of a branch that ran again, in the surroundings that it ran in."""


def rerun(record: Record, streams: Sequence[Tensor], call: Call, capture: Capture | None, then: Then) -> None:
    """Run a step's branch again on streams made by `Record.start`, then `then` on its update."""
    ambient = call.ambient
    with Replaying():
        if ambient.holds_now() and not has_forward_hooks(record.block) and not inside_function_transform():
            _rerun_branch(record, streams, call.context(), capture, then)
            return
        with ambient.again(), outside_function_transforms():
            _rerun_block(record, streams, call, capture, then)


def _rerun_block(record: Record, streams: Sequence[Tensor], call: Call, capture: Capture | None, then: Then) -> None:
    """Run the branch from within its block, whose hooks gather parameters under FSDP."""

    def again(wire: Wire, given: Streams, context: Mapping[str, Any]) -> tuple[Streams, None]:
        if wire is record.wire:
            _rerun_branch(record, given, context, capture, then)
        return given, None

    record.block(tuple(streams), call.context(), again, call.names)


def _rerun_branch(
    record: Record, streams: Sequence[Tensor], context: Mapping[str, Any], capture: Capture | None, then: Then
) -> None:
    step, replay = record.wire.step, record.replay
    sources = [streams[i] for i in record.wire.sources]
    kwargs = step.takes.select(context) if context else context
    hooks = capturing(capture)
    if record.decisions is not None:
        hooks = _deciding(record.decisions, hooks)
    if record.taking is not None:
        hooks, record.taking = _both(record.taking, hooks), None
    if replay.is_quiet():
        with hooks:
            update = step.update_again(replay.branch, sources, kwargs)
        then(update)
        return
    with replay.again():
        with hooks:
            update = step.update_again(replay.branch, sources, kwargs)
        replay.check_draws()
        then(update)


@contextmanager
def _deciding(taken: list[tuple[Tensor, int]], hooks: AbstractContextManager[None]) -> Iterator[None]:
    """A context in which a branch decides what it did before."""
    decisions = Decisions(taken)
    begin(decisions)
    try:
        with hooks:
            yield
    finally:
        end()
    decisions.check_all_taken()


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def capturing(capture: Capture | None) -> AbstractContextManager[None]:
    """A context in which what autograd saves goes to `capture`; any context if there is none."""
    return NOTHING if capture is None else capture.hooks()


NOTHING = nullcontext()


def _mismatch(record: Record, difference: str) -> RuntimeError:
    return RuntimeError(
        f"The replay of {record.wire.step.name} in the block [{record.block.describe()}] {difference}. A branch must "
        "do the same each time it runs: look for state kept outside of buffers, data that changed in between, or "
        "control flow that depends on either. If it decides by comparing (top-k routing), rounding in a rebuilt stream "
        "may have tipped a decision: retrograde.decide() replays it, memory='checkpoint' rebuilds without rounding. "
        "retrograde.is_replaying() tells the runs apart, and memory='store' avoids the replay."
    )


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
