"""Runs of a step off the hot path: unrecorded, observed, or through a block whose hooks have to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograde.network.block import BoundStep, run_step
from retrograde.network.step import Step, StepError
from retrograde.network.streams import Streams, replaced, versions

from .call import Call
from .exactness import Ranges, note_range
from .observer import BranchRun, Observer
from .rng_lock import RNG_LOCK
from .step_cache import cache_of
from .step_record import StepRecord
from .torch_internals import outside_function_transforms, set_grad_enabled


def observed(observer: Observer, record: StepRecord, sources: list[Tensor], *, is_replay: bool) -> Callable[..., Any]:
    """The branch of a recorded step, run by an observer."""

    def run(*inputs: Tensor, **kwargs: Any) -> Any:
        step = record.bound.step
        return observer.on_step(
            BranchRun(record.index, step, record.state.branch, sources, list(inputs), kwargs, is_replay)
        )

    return run


def run_unrecorded(
    call: Call, index: int, bound: BoundStep, streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, Tensor | None]:
    """Run a step whose graph autograd keeps. If it draws or edits, other threads' branches that do so wait for it."""
    environment, step = call.environment, bound.step
    cache = cache_of(step)
    traits = cache.traits([step.branch.training] if isinstance(step.branch, torch.nn.Module) else [])
    run = partial(run_plainly, call.observer, call.ranges, index, bound, streams, context)
    if traits.is_new:
        state = cache.branch_state(step.branch, step.coupling)
        weights = versions(state.snapshot.tracked)
        state.begin(environment, traits)
        try:
            result = run()
            state.end(environment, traits, weights)
        finally:
            state.leave()
        return result
    with RNG_LOCK if traits.draws or traits.edits else nullcontext():
        if traits.draws:
            environment.states = environment.read()
        result = run()
        now = environment.read()
        traits.draws, environment.states = now != environment.states, now
    return result


def run_plainly(
    observer: Observer | None,
    ranges: Ranges,
    index: int,
    bound: BoundStep,
    streams: Streams,
    context: Mapping[str, Any],
) -> tuple[Streams, Tensor | None]:
    """Run one step in plain autograd, its branch by the observer if there is one."""
    step, target = bound.step, bound.target
    try:
        if observer is None:
            after, aux = run_step(bound, streams, context)
        else:
            sources = [streams[i] for i in bound.sources]
            kwargs = step.takes.select(context)
            run = BranchRun(index, step, step.branch, sources, step.branch_inputs(sources), kwargs, is_replay=False)
            before = versions(sources)
            update, aux = step.split_aux(observer.on_step(run))
            if versions(sources) != before:
                raise step.edited_source()
            after = replaced(streams, target, step.combine(streams[target], update))
    except Exception as error:
        if not torch.compiler.is_compiling():
            explain(error, index, step, streams)
        raise
    if step.exact:
        note_range(ranges, index, step, streams[target], after[target])
    return after, aux


def replay_in_block(
    replay_branch: Callable[..., Tensor],
    record: StepRecord,
    streams: Sequence[Tensor],
    context: Mapping[str, Any],
    call: Call,
    *how: Any,
) -> Tensor:
    """Replay a step from within its block, whose hooks gather parameters under FSDP, in the settings of the call."""
    results: list[Tensor] = []

    def run_one(steps: object, given: Streams, context: Mapping[str, Any]) -> tuple[Streams, tuple[Tensor, ...]]:
        results.append(replay_branch(record, given, context, call, *how))
        set_grad_enabled(True)  # for the hooks after it
        return given, ()

    with call.environment.restored(), outside_function_transforms():
        try:
            record.block(tuple(streams), context, run_one, call.names)
        except Exception as error:
            if results:
                add_note(error, f"(raised by a hook of block {record.index} when the block was replayed: hooks of a "
                         "block run in replays too; retrograde.is_replaying() tells the runs apart)")  # fmt: skip
            raise
    return results[0]


def note_inputs(
    record: StepRecord, call: Call, sources: Sequence[Tensor], kwargs: Mapping[str, Any], context: Mapping[str, Any]
) -> None:
    """Note what the branch gets, as far as its replay could not know: equal inputs, and a context that may change.

    Which inputs are one tensor the branch may ask (nn.MultiheadAttention does), in its replay too.
    """
    inputs: list[tuple[int | str, Any]] = [*enumerate(sources), *kwargs.items()]
    record.same = [(place, i) for place, v in inputs for i, source in enumerate(sources) if v is source and place != i]
    record.context = call.context_now(context)


def as_in_first_run(record: StepRecord) -> ExitStack:
    """A context in which all that the step's branch reads is as it was in its first run."""
    with ExitStack() as around:
        if record.state.needs_restoring(record.weights):
            around.enter_context(record.state.restored())
        if record.context is not None:
            around.enter_context(record.context.restored())
        return around.pop_all()


def explain(error: Exception, index: int, step: Step, streams: Streams) -> None:
    """Say in an error which block and branch it comes from. Our own errors say so themselves."""
    if "don't yet support saved tensor hooks" in str(error):
        raise StepError(
            f"{step.name} uses torch.func.grad, vjp, jacrev or hessian, which torch forbids under the hooks of a tape. "
            "Use torch.autograd.grad(..., create_graph=True), or give the block memory='store'."
        ) from error
    if isinstance(error, StepError):
        return
    shapes = ", ".join(str(tuple(s.shape)) for s in streams)
    note = f"(raised by the branch {step.name} in block {index} of a ReversibleSequence; streams of shapes {shapes})"
    add_note(error, note)


def add_note(error: Exception, note: str) -> None:
    """Add a sentence to an error of somebody else's code."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
