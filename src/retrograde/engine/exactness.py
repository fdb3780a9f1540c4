"""Exact stacks: every step on one grid, streams that start on it, and what to do when one leaves its range.

NOTE [A grid that was taken in a call]
 A stack with overflow="rescale" may continue with a coarser grid than it was built with. Saved and loaded, it would
 compute other bits, so a block then holds the grid's bits as a buffer, `rescaled_bits`, which is in its
 `state_dict`. A block that loads such a state takes over the grid; one that loads a state without, returns to
 its own. Blocks that were never rescaled have no such buffer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrograde.couplings import Additive, Exact, ExactScaled, OutOfRangeError, Scaled
from retrograde.couplings.grid import Grid
from retrograde.network.block import Block
from retrograde.network.step import Step, StepError, StreamName
from retrograde.network.streams import Streams

from . import rng
from .fake_internals import has_values
from .preserve import StateSnapshot
from .torch_internals import (
    assert_in_graph,
    inside_function_transform,
    is_exporting,
    outside_function_transforms,
    without_transforms,
)

Result = TypeVar("Result")
Ranges = list[tuple[int, Step, Tensor, Tensor]]
"""For each exact step that ran: its block, and the bounds of what must be within the range of its grid."""


def make_exact(blocks: Sequence[Block], bits: int | None) -> None:
    """Give every step the exact form of its coupling. Steps that replace their stream stay as they are."""
    _couple(blocks, bits)
    for block in dict.fromkeys(blocks):
        _forget_rescaling(block)
        if not getattr(block, "_loads_grid", False):
            block.register_load_state_dict_pre_hook(_load_grid)  # type: ignore[no-untyped-call]
            block._loads_grid = True  # type: ignore[assignment]


def grid_bits_of(blocks: Sequence[Block]) -> int | None:
    """The bits of the grid that exact blocks are on."""
    return next((step.coupling.bits for block in blocks for step in block.each_step() if step.exact), None)


def _couple(blocks: Sequence[Block], bits: int | None) -> None:
    forms = [(step, _exact_form(i, step, bits)) for i, block in enumerate(blocks) for step in block.each_step()]
    for step, coupling in forms:  # all of them, or none
        step.couple(coupling)


def make_ordinary(blocks: Sequence[Block]) -> None:
    """Give every step the ordinary form of its coupling."""
    for block in blocks:
        _forget_rescaling(block)
        for step in block.each_step():
            if isinstance(step.coupling, ExactScaled):
                step.couple(Scaled(step.coupling.keep, step.coupling.scale))
            elif isinstance(step.coupling, Exact):
                step.couple(Additive() if step.coupling.scale == 1 else Scaled(scale=step.coupling.scale))


def _exact_form(block: int, step: Step, bits: int | None) -> Any:
    coupling = step.coupling
    if type(coupling) is Additive:
        return Exact(bits)
    if type(coupling) is Scaled:
        return Exact(bits, coupling.scale) if coupling.keep == 1 else ExactScaled(bits, coupling.scale, coupling.keep)
    if step.exact:
        return replace(coupling, bits=bits)
    if not step.invertible:
        return coupling
    raise ValueError(
        f"Block {block}: {step.name} is coupled by {type(coupling).__name__}, which has no exact form here. "
        "Use Additive or Scaled in its place, or leave exact out and place anchors (max_drift=1e-3)."
    )


def check_all_exact(blocks: Sequence[Block]) -> None:
    """Raise if exact and rounding steps are mixed: a stream that drifts makes every branch that reads it drift."""
    steps = [(i, step) for i, block in enumerate(blocks) for step in block.each_step() if step.invertible]
    rounding = [f"block {i} {step.name} ({type(step.coupling).__name__})" for i, step in steps if not step.exact]
    if rounding and len(rounding) < len(steps):
        raise ValueError(
            f"Some steps are exact and others round: {', '.join(rounding[:4])}{' …' if len(rounding) > 4 else ''}. A "
            "stream that drifts makes the branches that read it drift, so none would be exact. Make all of them exact, "
            "or none."
        )
    if len(grids := dict.fromkeys(step.coupling.bits for _, step in steps if step.exact)) > 1:
        raise ValueError(
            f"Steps are on different grids: bits={', '.join(map(str, grids))}. A stream on a fine grid leaves its "
            "range where a coarse one does not notice. Give all steps the same bits, or the stack grid_bits=."
        )


def grid_placements(
    blocks: Sequence[Block], running: Sequence[int], names: tuple[StreamName, ...]
) -> dict[int, list[tuple[int, Step]]]:
    """Which streams have to be put on the grid before which block, for the step that will update them next.

    All of them before the first exact block, and later those that a step replaced.
    """
    lists = [blocks[i]._modules["steps"]._modules for i in running]  # type: ignore[union-attr]  # a shorter search
    if not any(step.exact for steps in lists for step in steps.values()):  # type: ignore[union-attr]
        return {}
    off_grid = set(range(len(names)))
    placements: dict[int, list[tuple[int, Step]]] = {}
    for done, i in enumerate(running):
        block = blocks[i]
        if off_grid and block.exact:
            for position in sorted(off_grid):
                step = _next_step([blocks[j] for j in running[done:]], names, position)
                if step is not None and step.exact:
                    placements.setdefault(i, []).append((position, step))
                if step is None or step.exact:
                    off_grid.discard(position)
        off_grid |= {bound.target for bound in block.bound_steps(names) if not bound.step.exact}
        if block.order is not None:
            off_grid = {block.order.index(position) for position in off_grid}
    return placements


def _next_step(blocks: Sequence[Block], names: tuple[StreamName, ...], position: int) -> Step | None:
    """The step that is the next to update a stream."""
    for block in blocks:
        for bound in block.bound_steps(names):
            if bound.target == position:
                return bound.step
        position = position if block.order is None else block.order.index(position)
    return None


def placed_on_grid(block: int, placements: Sequence[tuple[int, Step]], streams: Streams, ranges: Ranges) -> Streams:
    """The streams as a block needs them: on the grid of the steps that will update them next."""
    placed = list(streams)
    for position, step in placements:
        placed[position] = step.coupling.prepare(streams[position])
        note_range(ranges, block, step, placed[position], placed[position])
    return tuple(placed)


def note_range(ranges: Ranges, block: int, step: Step, target: Tensor, combined: Tensor) -> None:
    """Note how far an exact step went; the range is checked when the call ends."""
    low, high = step.coupling.bounds(target, combined)
    if not torch.compiler.is_compiling():
        ranges.append((block, step, low, high))
    elif not is_exporting():  # to read a number would break the graph
        limit = step.coupling.grid(combined.dtype).limit
        inside = torch.maximum(-low, high) < limit
        assert_in_graph(inside, f"A stream left the range of its grid: it reached {limit:g}.")


def check_ranges(ranges: Ranges) -> None:
    """Raise if a stream left the range of its grid in this call. An accelerator is waited for once."""
    noted = list(ranges)
    ranges.clear()
    if not inside_function_transform():
        _check_noted(noted)
        return
    with outside_function_transforms():
        whole = ((i, step, without_transforms(low), without_transforms(high)) for i, step, low, high in noted)
        _check_noted([(i, step, low.amin(), high.amax()) for i, step, low, high in whole])


def _check_noted(noted: Ranges) -> None:
    """Raise for the first bound that is out of range."""
    for device in dict.fromkeys(low.device for _, _, low, _ in noted):
        steps = [each for each in noted if each[2].device == device]
        if has_values(steps[0][2]):
            on_host = torch.stack([bound for _, _, low, high in steps for bound in (low, high)]).cpu()
            bounds = on_host.tolist() if type(on_host) is Tensor else list(map(float, on_host))  # of a subclass
            _check_values(steps, [max(-low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True)])


def _check_values(steps: Ranges, values: list[float]) -> None:
    grids = {(step.coupling.bits, high.dtype) for _, step, _, high in steps}
    limit = min(Grid(dtype, bits).limit for bits, dtype in grids)
    if all(value < limit for value in values):
        return
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    for (block, step, _, high), value in zip(steps, values, strict=True):
        try:
            step.coupling.grid(high.dtype).check(value, later=most)
        except OutOfRangeError as reason:
            error = StepError(f"{step.name}: stream {step.target!r} {reason}")
            error.bits = reason.bits
            raise error.at(block) from None


def rescaling(blocks: Sequence[Block], devices: Sequence[torch.device], run: Callable[[], Result]) -> Result:
    """Run; where a stream leaves its range, take the finest grid that holds it and run the call again."""
    while True:
        try:
            with _undone_by_errors(blocks, devices):
                return run()
        except StepError as error:
            if error.bits is None:
                raise
            _rescale(blocks, error.bits)
            warnings.warn(
                f"{error} The stack continues with a grid of 2^-{error.bits}; the call was started again. Give "
                f"grid_bits={error.bits} to start with it.",
                RuntimeWarning,
                stacklevel=5,
            )


def _rescale(blocks: Sequence[Block], bits: int) -> None:
    """Take another grid, and keep it in the blocks' states. See NOTE [A grid that was taken in a call]."""
    own = [[step.coupling.bits for step in block.each_step() if step.exact] for block in blocks]
    _couple(blocks, bits)
    for block, given in zip(blocks, own, strict=True):
        if given:
            _note_rescaling(block, bits, given[0])


def _note_rescaling(block: Block, bits: int, own: int | None) -> None:
    if "rescaled_bits" not in block._buffers:
        block._own_bits = own  # type: ignore[assignment]
    block.register_buffer("rescaled_bits", torch.tensor(bits))


def _forget_rescaling(block: Block) -> None:
    if "rescaled_bits" in block._buffers:
        del block.rescaled_bits


def _load_grid(
    block: Any, state: Mapping[str, Any], prefix: str, metadata: Any, strict: Any, missing: Any, unexpected: Any,
    errors: list[str],
) -> None:  # fmt: skip
    """Before a block loads its state: take over the grid in it."""
    saved = state.get(f"{prefix}rescaled_bits")
    own = [step.coupling.bits for step in block.each_step() if step.exact]
    if saved is not None and not own:
        errors.append(
            f"{prefix}rescaled_bits: the state is that of an exact stack, which continued with a grid of "
            f"2^-{int(saved)}, and this one is not exact. Set stack.exact = True before it loads the state."
        )
    elif saved is not None:
        _couple([block], int(saved))
        _note_rescaling(block, int(saved), own[0])
    elif "rescaled_bits" in block._buffers:
        _couple([block], block._own_bits)
        _forget_rescaling(block)


@contextmanager
def _undone_by_errors(blocks: Sequence[Block], devices: Sequence[torch.device]) -> Iterator[None]:
    """After an error, generators and the blocks' buffers are as they were.

    Only blocks that may edit buffers, or draw from other generators than torch's, need a snapshot of their modules.
    """
    parts = [block for block in blocks if any(map(_may_leave_a_trace, block.each_step()))]
    snapshots = [StateSnapshot.of(parts, devices)] if parts else []
    snapshots.append(StateSnapshot((), rng.torch_generators(devices)))
    try:
        yield
    except StepError:
        for snapshot in snapshots:
            snapshot.restore()
        raise


def _may_leave_a_trace(step: Step) -> bool:
    """Whether the step's branch may edit buffers, or draw from Python's, NumPy's or its own generators."""
    if step.cache is None:
        return True
    branch = step.branch
    traits = step.cache.traits([branch.training] if isinstance(branch, nn.Module) else [])
    return bool(traits.edits or traits.draws_globally or traits.draws_own)
