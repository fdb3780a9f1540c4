"""Exact stacks: every step on one grid, streams that start on it, and what to do when one leaves its range."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
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
    forms = [(step, _exact_form(i, step, bits)) for i, block in enumerate(blocks) for step in block.each_step()]
    for step, coupling in forms:  # all of them, or none
        step.couple(coupling)


def make_ordinary(blocks: Sequence[Block]) -> None:
    """Take the grid away again."""
    for block in blocks:
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
        self._loose = set(range(len(names))) if any(block.exact for block in blocks) else set()
        self._idle = not self._loose

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
        if not self._idle:
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
            make_exact(blocks, error.bits)
            warnings.warn(
                f"{error} The stack goes on with a grid of 2^-{error.bits}; the call was started again. Give "
                f"exact={error.bits} to start with it.",
                RuntimeWarning,
                stacklevel=5,
            )


@contextmanager
def _undone_by_errors(blocks: Sequence[Block], devices: Sequence[torch.device]) -> Iterator[None]:
    """After an error, generators and the blocks' buffers are as they were."""
    before = Before(blocks, devices)
    try:
        yield
    except StepError:
        before.restore()
        raise
