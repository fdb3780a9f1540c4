"""What a tape writes down of a call and of its steps, and how a step is run a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ._block import Block, Wire
from ._decide import Decisions, begin, end
from ._habits import Known
from ._packing import Pack, detaching_packer
from ._partial import keeping_nothing
from ._randomness import held_in
from ._replay import Ambient, Replay, Replaying, edited_in_place
from ._step import StreamName
from ._streams import Streams
from ._torch_private import (
    is_called_plainly,
    left_over,
    needs_grad,
    outside_function_transforms,
    pop_hooks,
    push_hooks,
    saved_tensor_hooks_active,
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

    They must be detached from any graph: aliases with the same storage and version counter. Where hooks are around
    the call a node keeps them, and its output is held too: in torch 2.6 a node frees what it saved when its output
    goes.
    """

    __slots__ = ("_output", "_unpacked", "_versions")

    def __init__(self, tensors: Streams) -> None:
        if not saved_tensor_hooks_active():
            self._unpacked: Streams | None = tensors
            self._versions = versions(tensors)
            return
        with torch.enable_grad():
            self._output: Any = _Keep.apply(_SPARK, tensors)  # type: ignore[no-untyped-call]
        self._unpacked = None

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

    __slots__ = ("_kept", "_leaves", "_spec", "_tensors", "ambient", "names")

    def __init__(self, names: tuple[StreamName, ...], streams: Streams, context: Mapping[str, Any]) -> None:
        self.names = names
        self._spec: Any = None
        leaves: list[Any] = []
        if context:
            leaves, self._spec = tree_flatten(dict(context))
        found = {i: value for i, value in enumerate(leaves) if isinstance(value, Tensor)}
        kept = tuple({id(t): t for t in found.values()}.values())  # one that has two names is one in a replay too
        numbers = {id(t): number for number, t in enumerate(kept)}
        self._tensors = [(i, numbers[id(t)]) for i, t in found.items()]
        self._leaves = [None if isinstance(value, Tensor) else value for value in leaves]
        self._kept = Kept(tuple(leaf(t, t.requires_grad) for t in kept)) if kept else None
        devices = dict.fromkeys(t.device for t in (*streams, *kept))
        self.ambient = Ambient(list(devices), self._leaves)

    def context(self) -> Mapping[str, Any]:
        """The context as the first run had it, without its producer's graph."""
        if self._spec is None:
            return {}
        leaves = list(self._leaves)
        if self._kept is not None:
            tensors = self._kept.tensors()
            for i, number in self._tensors:
                leaves[i] = tensors[number]
        context: Mapping[str, Any] = tree_unflatten(leaves, self._spec)
        return context


class Form:
    """How a step was found before its first run: what later calls share with this one while it still `holds`.

    The step keeps it, so it does not keep the step: a model is freed when the last reference to it goes.
    """

    __slots__ = ("_target", "coupling", "habits", "is_steady", "replay", "requires", "stride")

    def __init__(self, wire: Wire, streams: Streams, known: Known) -> None:
        self.coupling = wire.step.coupling
        self._target = wire.target
        self.requires = known.same("streams", list(map(needs_grad, streams)))
        self.stride = streams[wire.target].stride()
        self.replay = Replay(wire.step.branch, wire.step.coupling, known)
        self.habits = known.habits(self.replay.survey.training)
        self.is_steady = False  # until a first run has shown that it leaves nothing behind

    def holds(self, wire: Wire, streams: Streams) -> bool:
        """Whether the step would be found like this again."""
        step, replay = wire.step, self.replay
        return (
            self._target == wire.target
            and self.coupling is step.coupling
            and step._modules.get("branch") is replay.branch
            and streams[wire.target].stride() == self.stride
            and list(map(needs_grad, streams)) == self.requires
            and replay.survey.holds()
            and not held_in(replay.survey.attributes)
        )


class Record:
    """What the first run of one step leaves behind: no activation, unless it had to stay."""

    side: Tensor | None = None  # what the coupling forgets of its target
    decisions: list[tuple[Tensor, int]] | None = None
    kept = False  # whether the first run was to keep results
    taking: AbstractContextManager[Any] | None = None  # for one replay: it takes results that were kept
    stayed: Stayed | None = None
    same: Sequence[tuple[int | str, int]] = ()  # sources and context that were one tensor with a source before them
    branch_saves = 0

    def __init__(self, block: Block, wire: Wire, streams: Streams, known: Known) -> None:
        form: Form | None = known.form
        if form is None or not form.holds(wire, streams):
            form = Form(wire, streams, known)
        self.block = block
        self.wire = wire
        self.form = form
        self.replay = form.replay
        self.weights = versions(form.replay.survey.tensors)
        self.versions: list[int] = []  # of the saved tensors

    def end(self, ambient: Ambient, known: Known) -> bool:
        """Keep what the first run used or changed. False if the step cannot be run again."""
        form, replay = self.form, self.replay
        if form.is_steady:
            if ambient.stands() and versions(replay.survey.tensors) == self.weights:
                return True
            known.form = None  # it drew or edited for the first time; others may have the form, which stays as it is
            self.replay = Replay(replay.branch, self.wire.step.coupling, known)
            return self.replay.end(ambient, form.habits, self.weights)
        can_replay = replay.end(ambient, form.habits, self.weights)
        form.is_steady = can_replay and not form.habits.draws_rare and replay.is_steady()
        if form.is_steady and known.remembers(replay.survey):
            known.form = form
        return can_replay

    def note_same(self, sources: Sequence[Tensor], kwargs: Mapping[str, Any]) -> None:
        """Note which inputs of the branch are one tensor: it may ask (nn.MultiheadAttention does), and again so."""
        inputs: list[tuple[int | str, Any]] = [*enumerate(sources), *kwargs.items()]
        self.same = [
            (place, i) for place, value in inputs for i, source in enumerate(sources) if value is source and place != i
        ]

    def note_saved(self, tensors: list[Tensor], versions: list[int], known: Known) -> None:
        """Note what the first run saved."""
        self.versions = versions.copy()
        self.saved = known.same("saved", (list(map(_shape, tensors)), list(map(_dtype, tensors))))

    def start(self, streams: Streams) -> list[Tensor]:
        """The streams to replay the step on: detached, its sources requiring grad where they did before."""
        found, requires = list(streams), self.form.requires
        for i in self.wire.sources:
            stream = found[i] = found[i].detach()
            if requires[i]:
                stream.requires_grad_()
        return found


class Stayed:
    """A step that cannot be run again: what it saved, and its target before and after."""

    __slots__ = ("after", "before", "tensors")

    def __init__(self, tensors: list[Tensor], before: Tensor, after: Tensor) -> None:
        self.tensors = [t.detach() for t in tensors]
        self.before = before.detach()
        self.after = after.detach()


def unedited(tensor: Tensor, expected: int) -> Tensor:
    """The tensor, if nobody edited it since its version was as expected."""
    if tensor._version != expected:
        raise edited_in_place(f"a tensor of shape {tuple(tensor.shape)} inside a branch")
    return tensor


_shape = attrgetter("shape")
_dtype = attrgetter("dtype")


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

    def __enter__(self) -> None:
        """Collect what autograd saves, from here on. Detached: its graph would keep the replay's streams alive."""
        pack = detaching_packer(self.tensors, self.versions)
        push_hooks(pack if self.stops_at < 0 else self._stopping(pack), self._unpack)

    def __exit__(self, *error: object) -> None:
        pop_hooks()

    def _stopping(self, pack: Pack) -> Pack:
        def pack_or_stop(tensor: Tensor) -> int:
            handle = pack(tensor)
            if handle + 1 == self.stops_at:
                raise Enough
            return handle

        return pack_or_stop

    def _unpack(self, position: int) -> Tensor:
        return unedited(self.tensors[position], self.versions[position])

    def check(self, rebuilt: Sequence[Tensor]) -> None:
        """After the replay: nothing is missing, and nobody edited a tensor in between."""
        tensors, record = self.tensors, self.record
        if (list(map(_shape, tensors)), list(map(_dtype, tensors))) != record.saved:
            raise _mismatch(record, self._difference())
        if self.versions != record.versions:
            self._check_edits(rebuilt)

    def _difference(self) -> str:
        tensors, (shapes, dtypes) = self.tensors, self.record.saved
        for i, (tensor, shape, dtype) in enumerate(zip(tensors, shapes, dtypes, strict=False)):
            if tensor.shape != shape or tensor.dtype != dtype:
                return (
                    f"saved another tensor at position {i} than its first run: {tuple(tensor.shape)} {tensor.dtype} "
                    f"for {tuple(shape)} {dtype}"
                )
        return f"saved {len(tensors)} tensors, where its first run saved {len(shapes)}"

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
        if ambient.holds_now() and is_called_plainly(record.block):
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
    sources = list(map(streams.__getitem__, record.wire.sources))
    kwargs = step.takes.select(context) if context else context
    for place, i in record.same:
        if isinstance(place, int):
            sources[place] = sources[i]
        else:
            kwargs = {**kwargs, place: sources[i]}
    hooks: AbstractContextManager[None] = NOTHING if capture is None else capture
    if record.decisions is not None:
        hooks = _deciding(record.decisions, hooks)
    if record.kept:
        hooks = _taking(record, hooks)
    if replay.is_quiet(record.weights):
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
def _taking(record: Record, hooks: AbstractContextManager[None]) -> Iterator[None]:
    """A context in which a branch takes what its first run kept; the second time there is nothing to take any more."""
    taking, record.taking = record.taking, None
    with taking or keeping_nothing(), hooks:
        yield
    if taking is not None and left_over(taking):
        raise _mismatch(record, "ran fewer of the operators whose results were kept than its first run")


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
