"""An ordered group of steps: the unit to which a memory mode is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .step import Step, StepError, StreamName
from .streams import Streams, replaced


class BoundStep(NamedTuple):
    """A step of a block, and the positions of the streams that it updates and reads."""

    step: Step
    target: int
    sources: tuple[int, ...]
    ends_block: bool


class RunSteps(Protocol):
    """Runs the steps of a block: the streams after them, and their auxiliary losses."""

    def __call__(
        self, steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
    ) -> tuple[Streams, tuple[Tensor, ...]]: ...


def run_step(bound: BoundStep, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Tensor | None]:
    """Run one step in plain autograd."""
    step = bound.step
    update, aux = step.update([streams[i] for i in bound.sources], step.takes.select(context))
    return replaced(streams, bound.target, step.combine(streams[bound.target], update)), aux


def run_steps(
    steps: Sequence[BoundStep], streams: Streams, context: Mapping[str, Any]
) -> tuple[Streams, tuple[Tensor, ...]]:
    """Run the steps of a block in plain autograd."""
    losses: tuple[Tensor, ...] = ()
    for bound in steps:
        streams, aux = run_step(bound, streams, context)
        if aux is not None:
            losses = (*losses, aux)
    return streams, losses


def invert_step(bound: BoundStep, streams: Streams, context: Mapping[str, Any]) -> Streams:
    """Undo one step in plain autograd."""
    step = bound.step
    if not step.invertible:
        raise StepError(f"{step.name} cannot be undone: {type(step.coupling).__name__} forgets its target.")
    if step.has_side_bits:
        raise StepError(
            f"{step.name} can only be undone in a backward pass, with the side bits of {type(step.coupling).__name__} "
            "from the forward pass. For inverse() use couplings.Scaled, whose inverse rounds."
        )
    update, _ = step.update([streams[i] for i in bound.sources], step.takes.select(context))
    return replaced(streams, bound.target, step.coupling.separate(streams[bound.target], update))


class Block(nn.Module):
    """Steps that belong together; the unit to which a memory mode is given.

    Streams are named by position (0, 1, …) or by any strings, in all steps alike. Named
    streams are ordered as `streams` says, otherwise as they first appear.

    Args:
        steps: the steps, in the order in which they run.
        streams: the names of the streams in order; needed only to fix another order.
        order: how the streams leave the block; `(1, 0)` swaps two streams' roles.
        groups: streams that are made of one input and merged into one output, by the name of that
            input; `{"video": ("video", "video_memory")}`.
    """

    def __init__(
        self,
        *steps: Step,
        streams: Sequence[str] | None = None,
        order: Sequence[int] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        if not steps or not all(isinstance(s, Step) for s in steps):
            raise ValueError(f"A block is made of one or more steps, not of {[type(s).__name__ for s in steps]}.")
        self.steps = nn.ModuleList(steps)
        self.names: tuple[StreamName, ...] = tuple(streams) if streams else _names_in(steps)
        self.order = tuple(order) if order is not None else None
        self.groups = {name: tuple(members) for name, members in (groups or {}).items()}
        self._bound: dict[tuple[StreamName, ...], tuple[list[Any], tuple[BoundStep, ...]]] = {}
        if self.order is not None and sorted(self.order) != list(range(len(self.names))):
            raise ValueError(f"order={self.order} is not a permutation of the block's {len(self.names)} streams.")
        self.bound_steps(self.names)

    @property
    def invertible(self) -> bool:
        return all(step.invertible for step in self.each_step())

    @property
    def exact(self) -> bool:
        """Whether a step of the block works on a grid."""
        return any(bound.step.exact for bound in self.bound_steps(self.names))

    @property
    def has_aux(self) -> bool:
        return any(step.aux == "loss" for step in self.each_step())

    def each_step(self) -> list[Step]:
        return [step for step in self.steps if isinstance(step, Step)]

    def bound_steps(self, names: tuple[StreamName, ...]) -> tuple[BoundStep, ...]:
        """The steps with their streams' positions among `names`, which may hold more than the block's own."""
        if torch.compiler.is_compiling():  # a compiled graph checks in each call whatever was read for it
            return self._bind(names)
        steps = [*self._modules["steps"]._modules.values()]  # type: ignore[union-attr]  # `self.steps` is a long search
        bound = self._bound.get(names)
        if bound is None or bound[0] != steps:  # one may have been exchanged
            bound = self._bound[names] = steps, self._bind(names)
        return bound[1]

    def _bind(self, names: tuple[StreamName, ...]) -> tuple[BoundStep, ...]:
        steps = self.each_step()
        missing = [n for n in _names_in(steps) if n not in names]
        if missing:
            raise ValueError(f"The block's steps use the streams {missing}, which are not among {list(names)}.")
        if self.order is not None and len(names) != len(self.order):
            raise ValueError(f"A block that reorders {len(self.order)} streams cannot be used among {len(names)}.")
        return tuple(
            BoundStep(step, names.index(step.target), tuple(names.index(s) for s in step.sources), i == len(steps) - 1)
            for i, step in enumerate(steps)
        )

    def forward(
        self,
        streams: Streams,
        context: Mapping[str, Any] | None = None,
        run_steps: RunSteps = run_steps,
        names: tuple[StreamName, ...] | None = None,
    ) -> tuple[Streams, tuple[Tensor, ...]]:
        """Run the steps: the streams after the block, and its auxiliary losses.

        Args:
            streams: the streams, in the order of `names`.
            context: what branches take by name.
            run_steps: how to run the steps; a tape has its own way.
            names: the streams' names, if they are not just the block's own.
        """
        bound_steps = self.bound_steps(self.names if names is None else names)
        streams, losses = run_steps(bound_steps, streams, {} if context is None else context)
        return self.reorder(streams), losses

    def inverse(
        self, streams: Streams, context: Mapping[str, Any] | None = None, names: tuple[StreamName, ...] | None = None
    ) -> Streams:
        """The streams before the block, from those after it."""
        streams = self.restore_order(streams)
        for bound in reversed(self.bound_steps(self.names if names is None else names)):
            streams = invert_step(bound, streams, {} if context is None else context)
        return streams

    def reorder(self, streams: Streams) -> Streams:
        return streams if self.order is None else tuple(streams[i] for i in self.order)

    def restore_order(self, streams: Streams) -> Streams:
        if self.order is None:
            return streams
        return tuple(streams[self.order.index(i)] for i in range(len(self.order)))

    def describe(self) -> str:
        return " · ".join(step.name for step in self.each_step())


def _names_in(steps: Sequence[Any]) -> tuple[StreamName, ...]:
    used = [name for step in steps for name in (step.target, *step.sources)]
    if all(isinstance(name, int) for name in used):
        if min(used) < 0:
            raise ValueError(f"Streams are counted from 0, but a step uses {min(used)}.")
        return tuple(range(max(used) + 1))
    if all(isinstance(name, str) for name in used):
        return tuple(dict.fromkeys(used))
    raise ValueError(f"Streams are named by numbers or by strings, not by both: {list(dict.fromkeys(used))}.")
