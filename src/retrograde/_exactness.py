"""Exact stacks: every step on one grid, streams that start on it, and what to do when one leaves its range."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import _randomness as randomness
from ._block import Block
from ._step import Step, StepError
from ._streams import Streams
from .couplings import Additive, Exact, ExactScaled, OutOfRangeError, Scaled

Result = TypeVar("Result")


def make_exact(blocks: Sequence[Block], bits: int | None) -> None:
    """Give every step the exact form of its coupling. Steps that replace their stream stay as they are."""
    for i, block in enumerate(blocks):
        for step in block.each_step():
            step.couple(_exact_form(i, step, bits))


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


def on_grid(block: Block, names: tuple[Any, ...], streams: Streams) -> Streams:
    """The streams as an exact block needs them: each on the grid of the step that updates it."""
    prepared = list(streams)
    for wire in block.wires(names):
        if wire.step.exact:
            try:
                prepared[wire.target] = wire.step.coupling.prepare(streams[wire.target])
            except OutOfRangeError as error:
                raised = StepError(f"Stream {names[wire.target]!r}, where {wire.step.name} begins, {error}")
                raised.bits = error.bits
                raise raised from None
    return tuple(prepared)


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
    """After an error, torch's generators and the blocks' buffers are as they were."""
    generators = randomness.everyday(devices)
    states = [randomness.read(g) for g in generators]
    buffers: list[tuple[nn.Module, str, Tensor]] = [
        (module, name, value.clone())
        for block in blocks
        for module in block.modules()
        for name, value in module.named_buffers(recurse=False)
    ]
    try:
        yield
    except StepError:
        for generator, state in zip(generators, states, strict=True):
            randomness.write(generator, state)
        for module, name, value in buffers:
            setattr(module, name, value)
        raise
