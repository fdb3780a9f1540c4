"""Run the blocks of a call as ordinary code with marks in it, for `torch.compile(model, backend="retrograde")`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from retrograde.engine.exactness import grid_placements, note_range, placed_on_grid
from retrograde.engine.graph_marks import END, SAVED, SOURCE, START, STEP, enter_stack, leave_stack
from retrograde.engine.outputs import Outputs
from retrograde.engine.torch_internals import is_sharded, tree_map
from retrograde.network.block import Block, BoundStep
from retrograde.network.save_ops import operators_of
from retrograde.network.step import Step, StepError, StreamName
from retrograde.network.streams import Streams, replaced

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
    layer_drop: Sequence[float] = (),
) -> Outputs:
    """Run the blocks of a call; what is recomputed in the backward pass is marked for the rule that cuts the graph.

    Args:
        hidden: the blocks after which the streams are wanted.
        layer_drop: the probabilities with which blocks are dropped; none if none is.
    """
    placements = grid_placements(blocks, [i for _, segment in segments for i in segment], names)
    outputs = Outputs(streams, names)
    depth = enter_stack()
    keeps = _draw_keeps(layer_drop, streams[0].device, depth) if layer_drop else None
    for mode, segment in segments:
        is_last = segment[-1] == segments[-1][1][-1]
        for i in segment:
            if i in placements:
                streams = placed_on_grid(i, placements[i], streams, [])
            if i == segment[0]:
                streams = _begin(mode, streams, depth)
            how = _BlockRun(mode, depth, i, is_last and i == segment[-1], None if keeps is None else keeps[i])
            try:
                streams, losses = blocks[i](streams, context, functools.partial(_run_steps, how), names)
            except StepError as error:
                raise error.at(i) from None
            if losses:
                outputs.aux_by_block[i] = losses
            if i in hidden:
                outputs.hidden[i] = tuple(SAVED(s, depth) for s in streams)
    leave_stack()
    is_exact = any(blocks[i].exact for _, segment in segments for i in segment)
    return outputs.after(tuple(END(s, is_exact, depth) for s in streams))


def run_recomputed(stream: Tensor, run: Callable[[Tensor], Any], selective: Step | None = None) -> Any:
    """Run something of which the backward pass recomputes everything from the saved stream.

    Args:
        run: what to run; every tensor that it returns is saved if the backward pass reads it.
        selective: the step whose `save_ops` are saved inside of it.
    """
    depth = enter_stack()
    stream = START(stream, "checkpoint", depth)
    result = run(stream if selective is None else SOURCE(stream, _saved_operators(selective), depth))
    leave_stack()
    return tree_map(lambda value: SAVED(value, depth) if isinstance(value, Tensor) else value, result)


def why_not_call(stack: nn.Module, *, is_observed: bool, rescales: bool) -> str | None:
    """Why a call of a stack cannot be traced; None if it can."""
    if is_sharded(stack):
        return "its parameters are sharded, and the compiler leaves out the hooks by which fully_shard gathers them"
    if is_observed:
        return "a guard or another observer looks into its backward pass"
    if rescales:
        return "overflow='rescale' runs a call again when a stream leaves its range; overflow='raise' does not"
    return None


def why_not_traced(index: int, block: Block, mode: str, drop: float) -> str | None:
    """Why a block with this memory mode and probability to be dropped cannot be part of a graph; None if it can."""
    if mode not in _TRACED:
        return f"block {index} has memory={mode!r}, which only a tape knows"
    if drop:
        return _why_not_dropped(index, block)
    for step in block.each_step():
        if mode.startswith("selective") and callable(step.save_ops):
            return f"block {index}, {step.name} has a policy as save_ops, which decides while it runs; name operators"
    return None


def _why_not_dropped(index: int, block: Block) -> str | None:
    """In the graph a block always runs, and where it is dropped the streams stay unchanged: nothing else may change."""
    if block.order is not None or not block.invertible:
        return f"layer_drop may leave out block {index}, which reorders its streams or has no inverse"
    if block.training and next(block.buffers(), None) is not None:
        return f"layer_drop may leave out block {index}, whose branches have buffers that they may edit"
    return None


def _begin(mode: str, streams: Streams, depth: int) -> Streams:
    if mode == "store":
        return tuple(SAVED(s, depth) for s in streams)
    kind = "checkpoint" if mode in _CHECKPOINTED else "reverse"
    return tuple(START(s, kind, depth) for s in streams)


def _draw_keeps(probabilities: Sequence[float], device: torch.device, depth: int) -> Tensor:
    """Which blocks are not dropped in this call: drawn in the graph, so that every choice is the same graph."""
    with torch.no_grad():
        keeps = torch.rand(len(probabilities), device=device) >= torch.tensor(probabilities, device=device)
        first = torch.arange(len(probabilities), device=device) == 0
        return cast("Tensor", SAVED(keeps | (first & ~keeps.any()), depth))  # if all would drop, the first one runs


class _BlockRun(NamedTuple):
    """How the steps of a block run. `keeps` says when the graph runs whether the block is; None if it always is."""

    mode: str
    depth: int
    block: int
    is_last: bool
    keeps: Tensor | None


def _run_steps(
    how: _BlockRun, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        if how.is_last and bound.ends_block and how.mode in _CHECKPOINTED:  # it keeps its graph
            streams = tuple(SAVED(s, how.depth) for s in streams)
        streams, aux = _run_step(how, bound, streams, context)
        losses = losses if aux is None else (*losses, _if_run(how, aux, torch.zeros_like(aux)))
    return streams, losses


def _run_step(
    how: _BlockRun, bound: BoundStep, streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, Tensor | None]:
    step, target = bound.step, streams[bound.target]
    sources, kwargs = [streams[i] for i in bound.sources], step.takes.select(context)
    if how.mode in _SELECTIVE:
        update, aux = step.update([SOURCE(s, _saved_operators(step), how.depth) for s in sources], kwargs)
    else:
        update, aux = step.update(sources, kwargs)
    combined = _if_run(how, step.combine(target, update), target)
    if step.exact:
        note_range([], how.block, step, target, combined)
    if how.mode in _REVERSED:
        with torch.no_grad():
            bits = (SAVED(step.coupling.side_bits(target), how.depth),) if step.has_side_bits else ()
            rebuilt = _if_run(how, step.coupling.separate(combined, update, *bits), combined)
        combined = STEP(combined, target, rebuilt, f"Block {how.block}: {step.name}", how.depth)
    return replaced(streams, bound.target, combined), aux


def _if_run(how: _BlockRun, value: Tensor, otherwise: Tensor) -> Tensor:
    return value if how.keeps is None else torch.where(how.keeps, value, otherwise)


def _saved_operators(step: Step) -> list[str]:
    return sorted(map(str, operators_of(step.save_ops)))


_REVERSED = ("reverse", "selective")
_SELECTIVE = ("selective", "selective checkpoint")
_CHECKPOINTED = ("checkpoint", "offload", "selective checkpoint")
_TRACED = (*_REVERSED, *_CHECKPOINTED, "store")
