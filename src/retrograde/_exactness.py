"""Exact stacks: every step on one grid, streams that start on it, and what to do when one leaves its range.

NOTE [A grid that was taken in a call]
 A stack with overflow="rescale" may go on with a coarser grid than it was built with. Other bits would come of it when
 it is saved and loaded, so that a block then holds the grid's bits as a buffer, `rescaled_bits`, which is in its
 `state_dict`. A block that loads such a state takes over the grid; one that loads a state without, returns to
 its own. Blocks that were never rescaled have no such buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._before import Before
from ._block import Block
from ._step import Step, StepError
from ._streams import Streams
from .couplings import Additive, Exact, ExactScaled, OutOfRangeError, Scaled

Result = TypeVar("Result")


def make_exact(blocks: Sequence[Block], bits: int | None) -> None:
    """Give every step the exact form of its coupling. Steps that replace their stream stay as they are."""
    _couple(blocks, bits)
    for block in dict.fromkeys(blocks):
        _forget_rescaling(block)
        if not getattr(block, "_loads_grid", False):
            block.register_load_state_dict_pre_hook(_load_grid)  # type: ignore[no-untyped-call]
            block._loads_grid = True  # type: ignore[assignment]


def _couple(blocks: Sequence[Block], bits: int | None) -> None:
    forms = [(step, _exact_form(i, step, bits)) for i, block in enumerate(blocks) for step in block.each_step()]
    for step, coupling in forms:  # all of them, or none
        step.couple(coupling)


def make_ordinary(blocks: Sequence[Block]) -> None:
    """Take the grid away again."""
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
        return type(coupling)(**{**vars(coupling), "bits": bits})
    if not step.invertible:
        return coupling
    raise ValueError(
        f"Block {block}: {step.name} is coupled by {type(coupling).__name__}, which has no exact form here. "
        "Use Additive or Scaled in its place, or leave exact out and place anchors (drift=1e-3)."
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
            "range where a coarse one does not notice. Give all steps the same bits, or the stack exact=bits."
        )


class OnGrid:
    """Puts streams on the grid in time: before the first exact block, and after steps that replaced them.

    Args:
        blocks: the blocks of a call, in the order in which they will run.
    """

    def __init__(self, blocks: Sequence[Block], names: tuple[Any, ...]) -> None:
        self._blocks = list(blocks)
        self._names = names
        self._done = 0
        exact = [wire.step.exact for block in blocks for wire in block.wires(names)]
        self._loose = set(range(len(names))) if any(exact) else set()
        self.is_idle = not self._loose

    def before(self, block: Block, streams: Streams) -> Streams:
        """The streams as the next block needs them: on the grid of the step that will update them next."""
        if not self._loose or not block.exact:
            return streams
        prepared = list(streams)
        for i in sorted(self._loose):
            step = self._next_step(i)
            if step is not None and step.exact:
                prepared[i] = self._prepared(step, i, streams[i])
            if step is None or step.exact:
                self._loose.discard(i)
        return tuple(prepared)

    def after(self, block: Block) -> None:
        """Note which streams a block took off the grid."""
        self._done += 1
        if not self.is_idle:
            self._loose |= {wire.target for wire in block.wires(self._names) if not wire.step.exact}
            if block.order is not None:
                self._loose = {block.order.index(i) for i in self._loose}

    def _next_step(self, position: int) -> Step | None:
        """The step that is the next to update a stream."""
        for block in self._blocks[self._done :]:
            for wire in block.wires(self._names):
                if wire.target == position:
                    return wire.step
            position = position if block.order is None else block.order.index(position)
        return None

    def _prepared(self, step: Step, position: int, stream: Tensor) -> Tensor:
        try:
            prepared: Tensor = step.coupling.prepare(stream)
        except OutOfRangeError as error:
            raised = StepError(f"Stream {self._names[position]!r}, where {step.name} begins, {error}")
            raised.bits = error.bits
            raise raised from None
        return prepared


def rescaling(blocks: Sequence[Block], devices: Sequence[torch.device], run: Callable[[], Result]) -> Result:
    """Run; where a stream leaves its range, take the finest grid that holds it and run again from the start."""
    while True:
        try:
            with _undone_by_errors(blocks, devices):
                return run()
        except StepError as error:
            if error.bits is None:
                raise
            _rescale(blocks, error.bits)
            warnings.warn(
                f"{error} The stack goes on with a grid of 2^-{error.bits}; the call was started again. Give "
                f"exact={error.bits} to start with it.",
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
    found = state.get(f"{prefix}rescaled_bits")
    own = [step.coupling.bits for step in block.each_step() if step.exact]
    if found is not None and not own:
        errors.append(
            f"{prefix}rescaled_bits: the state is that of an exact stack, which went on with a grid of "
            f"2^-{int(found)}, and this one is not exact. Set stack.exact = True before it loads the state."
        )
    elif found is not None:
        _couple([block], int(found))
        _note_rescaling(block, int(found), own[0])
    elif "rescaled_bits" in block._buffers:
        _couple([block], block._own_bits)
        _forget_rescaling(block)


@contextmanager
def _undone_by_errors(blocks: Sequence[Block], devices: Sequence[torch.device]) -> Iterator[None]:
    """After an error, generators and the blocks' buffers are as they were."""
    before = Before(blocks, devices)
    try:
        yield
    except StepError:
        before.restore()
        raise
