"""The hot path: a step's first run and its replay, each to be read from top to bottom.

Only branch, coupling and `ModuleSnapshot` are elsewhere. See NOTE [Rules of the tape], NOTE [What a replay restores].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from ctypes import string_at
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from retrograde.network.block import BoundStep
from retrograde.network.streams import Streams

from .call import Call, leaf
from .capture import Capture, StopReplay, signature
from .decisions import Decisions, deciding_as_before
from .replaying import REPLAYS
from .selective import reusing_results, run_saving_results
from .step_cache import cache_of
from .step_record import RetainedStep, StepRecord
from .torch_internals import (
    current_graph_task,
    last_graphs,
    never_compiled,
    pop_hooks,
    push_hooks,
    set_grad_enabled,
)
from .unusual_runs import as_in_first_run, explain, note_inputs, observed, replay_in_block, run_unrecorded

if TYPE_CHECKING:
    from .tape import Tape

Direction = Literal["undo", "redo"]

_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_read_rng = torch.default_generator.get_state


def run_steps(
    tape: Tape, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    """Run the steps of a block for the first time. The last step of a call keeps its graph (rule 5)."""
    if streams is not tape.streams:
        tape.check_unchanged(streams, "before")
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        if len(tape.records) < tape.steps:
            streams, aux = first_run(tape, bound, streams, context)
        else:
            tape.close(streams)
            tape.call.environment.check_global_rng()
            streams, aux = run_unrecorded(tape.call, tape.index, bound, streams, context)
        tape.streams = streams
        losses = losses if aux is None else (*losses, aux)
    return streams, losses


def first_run(  # noqa: C901  # one function, so that it is read from top to bottom
    tape: Tape, bound: BoundStep, streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, Tensor | None]:
    """Run one step for the first time, with handles in the place of what autograd saves."""
    call, saved, saved_versions = tape.call, tape.pending, tape.pending_versions
    step, position, target = bound.step, bound.target, streams[bound.target]
    own = step.__dict__  # any attribute of a module, and its branch most of all, is found after a longer search
    if saved:
        tape.flush()
    cache = own["cache"] or cache_of(step)
    cached, coupling = cache.replay, step.coupling  # which may be a module
    if (
        cached is None
        or cached.state.branch is not own["_modules"].get("branch")
        or cached.coupling is not coupling
        or cached.target != position
        or cached.stride != target.stride()
        or cached.requires != list(map(_requires_grad, streams))
        or not cached.state.snapshot.is_current()
    ):
        cached = cache.look(bound, streams)
    state, traits, decisions, around = cached.state, cached.traits, tape.decisions, call.environment
    weights = list(map(_version, tracked := state.snapshot.tracked))
    record = StepRecord(tape.block, tape.index, bound, cached, state, weights)
    is_steady = cached.is_steady
    call.open_decisions.append(decisions)
    try:
        guests = state.snapshot.guest_buffers() if state.snapshot.has_guests else ()
        if not is_steady:
            state.begin(around, traits)
        sources = list(map(streams.__getitem__, bound.sources))
        inputs = sources if own["reads"] == "each" and own["compute"] is None else step.branch_inputs(sources)
        kwargs = own["takes"].select(context) if context else {}
        if kwargs or len(sources) > 1:
            note_inputs(record, call, sources, kwargs, context)
        versions = list(map(_version, sources))
        run = state.branch if call.observer is None else observed(call.observer, record, sources, is_replay=False)
        result = run_saving_results(record, run, inputs, kwargs) if tape.is_selective else run(*inputs, **kwargs)
        if list(map(_version, sources)) != versions:
            raise step.edited_source()
        update, aux = (result, None) if own["aux"] == "none" else step.split_aux(result)
        can_replay = True
        if not is_steady:
            can_replay = state.end(around, traits, weights)
            cache.keep(cached, can_replay=can_replay)
        elif (
            string_at((now := _read_rng()).data_ptr(), now.numel()) != around.states[0]  # as `rng.read` does
            or (len(around.states) > 1 and around.drew())
            or list(map(_version, tracked)) != weights
            or (guests and state.snapshot.changed_guests(guests))  # of which there is no copy
        ):
            cache.replay = None  # it drew or edited for the first time; other records share `cached`, which stays
            record.state = cache.branch_state(state.branch, coupling)
            can_replay = record.state.end(around, traits, weights) and not state.snapshot.changed_guests(guests)
        record.graphs = last_graphs(cached.compiled) if cached.compiled else ()
        record.branch_saves = len(saved)
        shape = target.shape
        if not (own["takes_same_shape"] and isinstance(update, Tensor) and update.shape == shape):
            step.check_update(target, update)
        after: Tensor = coupling.combine(target, update)
        if own["invertible"] and (after.shape != shape or after.dtype != target.dtype):
            step.check_combined(target, after)
        if own["exact"] and after.numel():
            set_grad_enabled(False)
            try:
                bounds = torch.aminmax(after) if not step.has_own_range else coupling.bounds(target, after)
            finally:
                set_grad_enabled(True)
            call.ranges.append((tape.index, step, *bounds))
        record.versions = saved_versions.copy()
        record.saved = list(map(signature, saved))
        if record.saved == cache.saved:
            record.saved = cache.saved  # one list for all calls: thousands would keep the garbage collector busy
        cache.saved = record.saved
        if decisions.taken:
            record.decisions, tape.decisions = decisions.taken, Decisions()
        if not can_replay:
            record.retained = RetainedStep(saved, target, after)
        if own["has_side_bits"] or not traits.verified:
            tape.verify(record, target, update)
    except Exception as error:
        explain(error, tape.index, step, streams)
        raise
    finally:
        if not is_steady:
            state.leave()
        call.open_decisions.pop()
        first = tape.next_handle
        tape.next_handle = first + len(saved)
        saved.clear()
        saved_versions.clear()
    tape.records.append(record)
    tape.first_handles.append(first)
    return (*streams[:position], after, *streams[position + 1 :]), aux


def replay(record: StepRecord, streams: Streams, call: Call, capture: Capture | None, direction: Direction) -> Tensor:
    """Run a step's branch again, filling `capture`. Returns its target before the step ("undo") or after it ("redo").

    Args:
        streams: those after the step to "undo" it, those before the step to "redo" it; its sources are in both.
    """
    number, backward_pass = current_graph_task(), call.backward_pass
    if backward_pass[0] != number or number < 0:
        backward_pass = call.begin_pass(number)
    _, is_plain, context = backward_pass
    starts = list(streams)
    for i in record.bound.sources:  # where a new graph starts
        start = starts[i] = starts[i].detach()
        if record.cached.requires[i]:
            start.requires_grad_()
    REPLAYS.depth = getattr(REPLAYS, "depth", 0) + 1
    grad_enabled = torch.is_grad_enabled()
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
    if inference is not None:
        inference.__enter__()
    set_grad_enabled(True)
    try:
        block = record.block.__dict__
        if is_plain and not block["_forward_pre_hooks"] and not block["_forward_hooks"]:
            stream = replay_branch(record, starts, context, call, capture, direction)
        else:
            stream = replay_in_block(replay_branch, record, starts, context, call, capture, direction)
    except StopReplay:
        stream = starts[record.bound.target]  # of no use: nothing comes after the last step
    finally:
        REPLAYS.depth -= 1
        if inference is not None:
            inference.__exit__(None, None, None)
        set_grad_enabled(grad_enabled)
    if capture is not None:
        is_same = not record.graphs and capture.versions == record.versions
        if not (is_same and list(map(signature, capture.tensors)) == record.saved):
            capture.check((*starts, stream))
    return stream


def replay_branch(
    record: StepRecord,
    streams: Sequence[Tensor],
    context: Mapping[str, Any],
    call: Call,
    capture: Capture | None,
    direction: Direction,
) -> Tensor:
    """The part of a replay that runs the branch and the coupling, in the state of the first run."""
    step, state, bound, cached = record.bound.step, record.state, record.bound, record.cached
    own = step.__dict__
    sources = list(map(streams.__getitem__, bound.sources))
    context = context if record.context is None else record.context.rebuilt()
    kwargs = own["takes"].select(context) if context else {}
    for place, i in record.same:
        if isinstance(place, int):
            sources[place] = sources[i]
        else:
            kwargs[place] = sources[i]
    inputs = sources if own["reads"] == "each" and own["compute"] is None else step.branch_inputs(sources)
    run = state.branch if call.observer is None else observed(call.observer, record, sources, is_replay=True)
    if (
        cached.is_steady
        and cached.state is state
        and record.decisions is None
        and not (record.is_selective or record.context)
        and list(map(_version, state.snapshot.tracked)) == record.weights
        and state.snapshot.is_current()
    ):
        result = run_captured(capture, run, inputs, kwargs)
        return couple_again(record, streams[bound.target], result, capture, direction)
    with as_in_first_run(record):
        with ExitStack() as inside:
            if record.is_selective:
                inside.enter_context(reusing_results(record))
            if record.decisions is not None:
                inside.enter_context(deciding_as_before(record.decisions))
            result = run_captured(capture, run, inputs, kwargs)
        state.check_draws()
        return couple_again(record, streams[bound.target], result, capture, direction)


def couple_again(
    record: StepRecord, stream: Tensor, result: Any, capture: Capture | None, direction: Direction
) -> Tensor:
    """Take the update out of the stream, or put it in; with what the coupling saves."""
    coupling, stride = record.cached.coupling, record.cached.stride  # of the first run: the step may have others now
    requires = record.cached.requires[record.bound.target]
    update = result if record.bound.step.aux == "none" else result[0]
    if direction == "redo":
        combined: Tensor = run_captured(capture, coupling.combine, (leaf(stream, requires), update), {})
        return combined.detach()
    set_grad_enabled(False)  # `replay` sets it back
    side_bits = () if record.side_bits is None else (record.side_bits,)
    before: Tensor = coupling.separate(stream, update, *side_bits)
    if before.stride() != stride:  # kernels give other bits for another memory layout
        before = torch.empty_strided(before.shape, stride, dtype=before.dtype, device=before.device).copy_(before)
    if capture is not None and record.branch_saves < len(record.versions):
        set_grad_enabled(True)
        run_captured(capture, coupling.combine, (leaf(before, requires), update), {})
    return before


def run_captured(capture: Capture | None, run: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Run with hooks that put what autograd saves into the capture."""
    if capture is None:
        return run(*args, **kwargs)
    push_hooks(capture.pack or make_replay_hook(capture.tensors, capture.versions), capture.unpack)
    try:
        return run(*args, **kwargs)
    finally:
        pop_hooks()


@never_compiled
def make_pack_hook(tensors: list[Tensor], versions: list[int]) -> Callable[[Tensor], int]:
    """A hook that keeps what autograd saves in `tensors`, and gives autograd a number in its place: no work for gc."""
    keep, note, number = tensors.append, versions.append, itertools.count().__next__

    def pack(tensor: Tensor) -> int:
        keep(tensor)
        note(tensor._version)
        return number()

    return pack


@never_compiled
def make_replay_hook(tensors: list[Tensor], versions: list[int]) -> Callable[[Tensor], int]:
    """The same for a replay: tensors without their graph, which would keep the replay's streams alive."""
    keep, note, number = tensors.append, versions.append, itertools.count(len(tensors)).__next__

    def pack(tensor: Tensor) -> int:
        keep(tensor if tensor.is_leaf else tensor.detach())
        note(tensor._version)
        return number()

    return pack
