"""Run the blocks of a call, each segment of them under the tape of its memory mode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from retrograde.network.block import Block, BoundStep, run_step
from retrograde.network.step import Step, StepError, StreamName
from retrograde.network.streams import Streams, tracked, versions

from .call import Call
from .exactness import Ranges, check_ranges, grid_placements, placed_on_grid
from .observer import Observer
from .outputs import Outputs
from .reverse import ReverseTape
from .step_cache import cache_of
from .step_run import run_steps
from .tape import Tape
from .torch_internals import constant_when_traced, inside_function_transform, is_exporting
from .unusual_runs import explain, run_plainly, run_unrecorded

Method = TypeVar("Method", bound=Callable[..., Any])
MakeTape = Callable[[Call, int], Tape]

WHY_OUTSIDE = (
    "a reversible stack recomputes activations when autograd asks for them, which cannot be traced: use "
    'torch.compile(model, backend="retrograde"), or compile branches'
)


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks under one tape; None stands for no tape, where autograd keeps everything.

    `is_anchored` says that the streams before the first of them are saved, so that they need not be recomputed.
    """

    make_tape: MakeTape | None
    blocks: tuple[int, ...]
    is_anchored: bool = False


def outside_compiled_graphs(method: Method) -> Method:
    """Keep a compiler that traces the caller out of `method`; branches that were compiled themselves stay so.

    Compiled whole, the first run would be fused and the replay not, and saved tensors would differ.
    The compiler is only imported if it is at work.
    """
    disabled: list[Any] = []

    @constant_when_traced
    def make_ready() -> None:
        if not disabled:
            disabled.append(torch.compiler.disable(method, reason=WHY_OUTSIDE))

    @functools.wraps(method)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or is_exporting() or not torch.is_grad_enabled():
            return method(*args, **kwargs)
        make_ready()
        return disabled[0](*args, **kwargs)

    return cast("Method", inner)


@outside_compiled_graphs
def run_blocks(
    blocks: Sequence[Block],
    names: tuple[StreamName, ...],
    segments: Sequence[Segment],
    streams: Streams,
    context: Mapping[str, Any],
    *,
    hidden: Sequence[int] | set[int] = (),
    observer: Observer | None = None,
    keep_last_graph: bool = True,
    placements: Mapping[int, Sequence[tuple[int, Step]]] | None = None,
) -> Outputs:
    """Run the blocks of a call.

    Args:
        segments: the blocks that run, and under which tapes.
        hidden: the blocks after which the streams are wanted.
        observer: who looks into the call.
        keep_last_graph: whether the last step keeps its graph (rule 5); not where more blocks follow the segments.
        placements: where streams are put on a grid, if that is known already; see `grid_placements`.
    """
    ranges: Ranges = []
    streams, call = _begin_call(names, segments, streams, context, observer, ranges)
    if placements is None:
        placements = grid_placements(blocks, [i for segment in segments for i in segment.blocks], names)
    outputs = Outputs(streams, names)
    run_untaped = _untaped_runner(call, observer, ranges, is_exact=len(placements) > 0)
    for segment in segments:
        is_last = keep_last_graph and segment is segments[-1]
        with _tape_for(segment, blocks, call, is_last=is_last) as tape:
            for i in segment.blocks:
                if i in placements:
                    streams = placed_on_grid(i, placements[i], streams, ranges)
                try:
                    if tape is not None:
                        streams, losses = _run_taped(tape, segment, i, blocks[i], streams, context)
                    else:
                        streams, losses = blocks[i](streams, context, functools.partial(run_untaped, i), names)
                except StepError as error:
                    raise error.at(i) from None
                if losses:
                    outputs.aux_by_block[i] = losses
                if i in hidden:
                    outputs.hidden[i] = streams
            if tape is not None:
                tape.close(streams)
    _check_call(call, ranges, blocks)
    return outputs.after(streams)


def _check_call(call: Call | None, ranges: Ranges, blocks: Sequence[Block]) -> None:
    """What is checked once per call, at its end: the range of exact streams, and the global generators."""
    if ranges:
        check_ranges(ranges)
    if call is not None and call.environment.drew_globally:
        _expect_draws(blocks)


def _begin_call(
    names: tuple[StreamName, ...],
    segments: Sequence[Segment],
    streams: Streams,
    context: Mapping[str, Any],
    observer: Observer | None,
    ranges: Ranges,
) -> tuple[Streams, Call | None]:
    """The streams to start with, and what the tapes share; None in a call without tapes."""
    if not torch.is_grad_enabled() or inside_function_transform() or is_exporting():
        return streams, None
    if all(segment.make_tape is None for segment in segments):
        return streams, None
    streams = tracked(streams)
    return streams, Call(names, streams, context, observer, ranges)


def _tape_for(
    segment: Segment, blocks: Sequence[Block], call: Call | None, *, is_last: bool
) -> AbstractContextManager[Tape | None]:
    """The tape of a segment, if it has one. The last step of a call keeps its graph."""
    if call is None or segment.make_tape is None:
        return nullcontext()
    if call.environment.caches_parametrizations:  # what was computed before it, each step has to note
        for i in segment.blocks:
            for step in blocks[i].each_step():
                cache_of(step).replay = None
    return segment.make_tape(call, sum(len(blocks[i].steps) for i in segment.blocks) - is_last)


def _run_taped(
    tape: Tape, segment: Segment, index: int, block: Block, streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    """Run a block under a tape. Its hooks must not change streams that the tape will recompute."""
    call = tape.call
    if tape.hooks is None and len(tape.records) < tape.steps:
        if segment.is_anchored and isinstance(tape, ReverseTape) and index == segment.blocks[0]:
            tape.anchor(streams)
        tape.open(streams)
    if call.observer is not None and isinstance(tape, ReverseTape):
        tape.watch(call.observer.on_block(index, streams))
    tape.index, tape.block, tape.streams = index, block, streams
    run = functools.partial(run_steps, tape)
    if not (block._forward_hooks or block._forward_pre_hooks):
        result: tuple[Streams, tuple[Tensor, ...]] = block(streams, context, run, call.names)
        return result
    before = versions(streams)
    after, losses = block(streams, context, run, call.names)
    if tape.hooks is not None and tape.spans_blocks:
        tape.streams = block.reorder(tape.streams)
        tape.check_unchanged(after, "after")
        if versions(streams) != before:
            raise StepError(
                f"A hook on the block [{block.describe()}] edited a stream in place, of which the inverse cannot "
                "know: make the change a step, or give the block memory='store'."
            )
    return after, losses


def _untaped_runner(
    call: Call | None, observer: Observer | None, ranges: Ranges, *, is_exact: bool
) -> Callable[..., tuple[Streams, tuple[Tensor, ...]]]:
    """How the steps of a block run without a tape: in a call without tapes, or because the block stores."""
    if call is not None:
        return functools.partial(_run_stored, call)
    if observer is None and not is_exact and not torch.compiler.is_compiling():
        return _run_plain
    return functools.partial(_run_each, functools.partial(run_plainly, observer, ranges))


def _run_plain(
    index: int, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    """Run steps of which nothing will be replayed: their branches and couplings, and what checks their results."""
    losses: tuple[Tensor, ...] = ()
    try:
        for bound in steps:
            step, settings = bound.step, bound.step.__dict__  # an attribute of a module is found after a longer search
            branch = settings["_modules"].get("branch")
            if branch is None or context or settings["compute"] is not None or settings["reads"] != "each":
                streams, aux = run_step(bound, streams, context)
            else:
                sources = list(map(streams.__getitem__, bound.sources))
                before = versions(sources)
                result = branch(*sources)
                if versions(sources) != before:
                    raise step.edited_source()
                update, aux = (result, None) if settings["aux"] == "none" else step.split_aux(result)
                target = bound.target
                after = step.combine(streams[target], update)
                streams = (*streams[:target], after, *streams[target + 1 :])
            if aux is not None:
                losses = (*losses, aux)
    except Exception as error:
        explain(error, index, step, streams)
        raise
    return streams, losses


def _run_stored(
    call: Call, index: int, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    call.environment.check_global_rng()
    result = _run_each(functools.partial(run_unrecorded, call), index, steps, streams, context)
    call.environment.mark_global_rng()
    return result


def _run_each(
    run: Callable[..., tuple[Streams, Tensor | None]],
    index: int,
    steps: Sequence[BoundStep],
    streams: Streams,
    context: Mapping[str, Any],
) -> tuple[Streams, tuple[Tensor, ...]]:
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        streams, aux = run(index, bound, streams, context)
        if aux is not None:
            losses = (*losses, aux)
    return streams, losses


def _expect_draws(blocks: Sequence[Block]) -> None:
    """Python's or NumPy's generator moved, and no branch was known to use it: watch all in the next call."""
    for block in blocks:
        for step in block.each_step():
            cache_of(step).expect_draws()
    warnings.warn(
        "Python's or NumPy's global random generator was drawn from during a call of a ReversibleSequence, where "
        "its branches had not done so before. If a branch drew from it now, the draw was not recorded and this "
        "call's gradients are wrong; later calls record it. A draw of another thread does no harm.",
        RuntimeWarning,
        stacklevel=5,
    )
