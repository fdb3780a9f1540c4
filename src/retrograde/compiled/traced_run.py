"""Run the blocks of a call as ordinary code with marks in it, for `torch.compile(model, backend="retrograde")`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from retrograde.engine.exactness import grid_placements, note_range, placed_on_grid
from retrograde.engine.graph_marks import SAVED, SOURCE, START, STEP, enter_stack, leave_stack
from retrograde.engine.outputs import Outputs
from retrograde.network.block import Block, BoundStep
from retrograde.network.save_ops import operators_of
from retrograde.network.step import Step, StepError, StreamName
from retrograde.network.streams import Streams, replaced

from .regions import call_region, fits_region

TracedSegment = tuple[str, tuple[int, ...]]
"""Consecutive blocks and their memory mode, by name."""

ON_TAPE = (
    "A ReversibleSequence stays outside of the graph that backend='retrograde' compiles, and trains on its tape: "
    "{reason}. Gradients and memory are the same; its branches are not compiled."
)


def run_traced(
    blocks: Sequence[Block],
    names: tuple[StreamName, ...],
    segments: Sequence[TracedSegment],
    streams: Streams,
    context: Mapping[str, Any],
    *,
    hidden: set[int],
) -> Outputs:
    """Run the blocks of a call; what is recomputed in the backward pass is marked for the rule that cuts the graph."""
    placements = grid_placements(blocks, [i for _, segment in segments for i in segment], names)
    outputs = Outputs(streams, names)
    depth = enter_stack()
    for mode, segment in segments:
        is_last = segment[-1] == segments[-1][1][-1]
        for i in segment:
            if i in placements:
                streams = placed_on_grid(i, placements[i], streams, [])
            if i == segment[0]:
                streams = _begin(mode, streams, depth)
            run = functools.partial(_RUNNERS[mode], depth, i, is_last and i == segment[-1])
            try:
                streams, losses = blocks[i](streams, context, run, names)
            except StepError as error:
                raise error.at(i) from None
            if losses:
                outputs.aux_by_block[i] = losses
            if i in hidden:
                outputs.hidden[i] = tuple(SAVED(s, depth) for s in streams)
    leave_stack()
    return outputs.after(tuple(SAVED(s, depth) for s in streams))


def why_not_call(*, is_observed: bool, rescales: bool, drops: bool) -> str | None:
    """Why a call cannot be traced; None if it can."""
    if is_observed:
        return "a guard or another observer looks into its backward pass"
    if rescales:
        return "overflow='rescale' runs a call again when a stream leaves its range; overflow='raise' does not"
    return "layer_drop leaves out other blocks in each call, and each choice would be another graph" if drops else None


def why_not_traced(index: int, block: Block, mode: str) -> str | None:
    """Why a block with this memory mode cannot be part of a graph; None if it can."""
    if mode not in _RUNNERS:
        return f"block {index} has memory={mode!r}, which only a tape knows"
    for step in block.each_step():
        if mode == "selective" and callable(step.save_ops):
            return f"block {index}, {step.name} has a policy as save_ops, which decides while it runs; name operators"
    return None


def _begin(mode: str, streams: Streams, depth: int) -> Streams:
    if mode == "store":
        return tuple(SAVED(s, depth) for s in streams)
    kind = "checkpoint" if mode in ("checkpoint", "offload") else "reverse"
    return tuple(START(s, kind, depth) for s in streams)


def _run_stored(
    depth: int, block: int, is_last: bool, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        streams, aux = _run_step(block, bound, streams, context)
        losses = losses if aux is None else (*losses, aux)
    return streams, losses


def _run_checkpointed(
    depth: int, block: int, is_last: bool, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        if is_last and bound.ends_block:  # it keeps its graph: the backward pass begins with it
            streams = tuple(SAVED(s, depth) for s in streams)
        streams, aux = _run_step(block, bound, streams, context)
        losses = losses if aux is None else (*losses, aux)
    return streams, losses


def _run_step(
    block: int, bound: BoundStep, streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, Tensor | None]:
    """One step in plain autograd."""
    step = bound.step
    update, aux = _update(step, [streams[i] for i in bound.sources], step.takes.select(context))
    combined = step.combine(streams[bound.target], update)
    if step.exact:
        note_range([], block, step, streams[bound.target], combined)
    return replaced(streams, bound.target, combined), aux


def _run_reversed(
    depth: int, block: int, is_last: bool, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    return _run_marked(depth, block, steps, streams, context, is_selective=False)


def _run_selective(
    depth: int, block: int, is_last: bool, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    return _run_marked(depth, block, steps, streams, context, is_selective=True)


def _run_marked(
    depth: int,
    block: int,
    steps: Sequence[BoundStep],
    streams: Streams,
    context: Mapping[str, Any],
    *,
    is_selective: bool,
) -> tuple[Streams, tuple[Tensor, ...]]:
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        step, target = bound.step, streams[bound.target]
        sources = [streams[i] for i in bound.sources]
        if is_selective:
            sources = [SOURCE(s, _saved_operators(step), depth) for s in sources]
        run = step.update if is_selective else functools.partial(_update, step)
        update, aux = run(sources, step.takes.select(context))
        combined = step.combine(target, update)
        if step.exact:
            note_range([], block, step, target, combined)
        with torch.no_grad():
            bits = (SAVED(step.coupling.side_bits(target), depth),) if step.has_side_bits else ()
            rebuilt = step.coupling.separate(combined, update, *bits)
        combined = STEP(combined, target, rebuilt, f"Block {block}: {step.name}", depth)
        streams = replaced(streams, bound.target, combined)
        losses = losses if aux is None else (*losses, aux)
    return streams, losses


def _update(step: Step, sources: list[Tensor], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """Run the branch: its update, and its auxiliary loss if it has one."""
    if not fits_region(step):
        return step.update(sources, kwargs)
    return step.split_aux(call_region(step.branch, step.branch_inputs(sources), kwargs))


def _saved_operators(step: Step) -> list[str]:
    return sorted(map(str, operators_of(step.save_ops)))


_RUNNERS = {
    "reverse": _run_reversed,
    "selective": _run_selective,
    "checkpoint": _run_checkpointed,
    "offload": _run_checkpointed,
    "store": _run_stored,
}
