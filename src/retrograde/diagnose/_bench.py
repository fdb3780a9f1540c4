"""Runs of a user's model, forward and backward, under plans and remedies; what they give is compared elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrograde.engine.preserve import preserve
from retrograde.engine.torch_internals import tree_map
from retrograde.measure.batches import arguments, detached_leaf, tensors_in
from retrograde.measure.finite import check_has_values, first_non_finite, why_not_finite
from retrograde.measure.loss import Loss, check_loss, default_loss
from retrograde.measure.memory_tracker import Event, MemoryTracker
from retrograde.measure.stacks import parameters_of, stacks_of
from retrograde.memory import Mode, Plan
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence

from ._report import ExaminationError, Peak
from ._watch import StackLog, StackObserver, StackRun, Tell

Result = TypeVar("Result")
Plans = dict[ReversibleSequence, Plan]
Look = Callable[[StackRun], StackObserver]
"""What is watched in a run: makes the observer of each stack."""


@dataclass(frozen=True)
class Setup:
    """How the stacks run: their plans, and a wider dtype for their streams."""

    plans: Plans
    widen: Mapping[ReversibleSequence, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True)
class Gradients:
    """The gradients of one run: of each parameter, and of what entered each stack."""

    parameters: dict[Tensor, Tensor]
    inputs: dict[ReversibleSequence, list[Tensor]]


@dataclass(frozen=True)
class Run:
    """A forward pass: its loss, what was seen of each stack, and what can have a gradient."""

    loss: Tensor
    logs: dict[ReversibleSequence, StackLog]
    parameters: Sequence[Tensor]
    batch: Sequence[Tensor]

    def gradients(self) -> Gradients:
        """Run the backward pass."""
        inputs = [t for log in self.logs.values() for t in log.inputs]
        wanted = [*self.parameters, *inputs] or self.batch
        gradients: Sequence[Tensor | None] = torch.autograd.grad(self.loss, wanted, allow_unused=True)
        present = {tensor: g for tensor, g in zip(wanted, gradients, strict=True) if g is not None}
        by_parameter = {p: present[p] for p in self.parameters if p in present}
        by_stack = {stack: [present[t] for t in log.inputs if t in present] for stack, log in self.logs.items()}
        return Gradients(by_parameter, by_stack)


class Course(list[Event]):
    """A tracker's events; their phase is the place that the run was at. At `turn` the backward pass starts."""

    turn = 0
    _place = "forward, before the stack"

    def go(self, place: str) -> None:
        if place.startswith("backward") and not self.turn:
            self.turn = len(self)
        self._place = place

    def append(self, event: Event) -> None:
        super().append(event._replace(phase=self._place))

    def peaks(self) -> dict[str, int]:
        """The most live bytes at each place."""
        peaks: dict[str, int] = {}
        for event in self:
            peaks[event.phase] = max(peaks.get(event.phase, 0), event.live)
        return peaks


class Bench:
    """A model with its batch and loss, which runs many times from the same state.

    Args:
        model: the user's model; it is left unchanged.
        batch: what to call it with (see `retrograde.measure.batches`).
        loss: makes a scalar of the model's output.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None) -> None:
        if not isinstance(model, nn.Module):
            raise ExaminationError(f"Give a torch.nn.Module, not a value of type {type(model).__name__}.")
        try:
            check_has_values(model, batch)
        except ValueError as error:
            raise ExaminationError(str(error)) from None
        self.model = model
        self.stacks = _in_a_sentence(stacks_of, model)
        self.steps = {step: words for name, stack in self.stacks.items() for step, words in _steps(name, stack)}
        self.copying: frozenset[Step] = frozenset()  # steps that get copies of their sources, which they edit
        self.output: tuple[tuple[int, ...], int] | None = None  # shape and bytes of the last output, if it is a tensor
        self._loss = loss
        self._arguments = arguments(batch)
        self.parameters = parameters_of(model)

    @property
    def reverses(self) -> bool:
        """Whether a block is set to be reversed."""
        return any(mode.needs_inverse for stack in self.stacks.values() for mode in stack.memory.modes)

    def plans(self, mode: Mode | None = None) -> Plans:
        """The mode for every block that can have it; without one the stacks' own plans, or all reversed if none is."""
        if mode is None and self.reverses:
            return {stack: stack.memory for stack in self.stacks.values()}
        return {stack: Plan.uniform(mode or "reverse", list(stack)) for stack in self.stacks.values()}

    def label(self, name: str) -> str:
        """What to call a stack where its blocks are named: nothing if there is only one."""
        return f"{name} " if len(self.stacks) > 1 else ""

    def preserved(self) -> AbstractContextManager[None]:
        """A context after which the model is as before, whatever ran inside."""
        return preserve(self.model, devices={t.device for t in tensors_in(self._arguments)})

    @contextmanager
    def run(
        self,
        setup: Setup,
        look: Look = StackObserver,
        *,
        within: AbstractContextManager[Any] | None = None,
        tell: Tell | None = None,
    ) -> Iterator[Run]:
        """One forward pass. The model is put back at the end.

        Args:
            within: a context to run in, entered when all is prepared.
            tell: is told where the run is. Its backward pass is then that of training, which ends where no gradient is
                needed; otherwise it goes through whole stacks.
        """
        with self.preserved(), ExitStack() as observed, torch.enable_grad():
            logs = {}
            for name, stack in self.stacks.items():
                plan, widen = setup.plans[stack], setup.widen.get(stack)
                observer = look(StackRun(plan, widen, self.copying, tell, self.label(name)))
                observed.enter_context(stack.observed_by(observer))
                logs[stack] = observer.log
            args, kwargs = tree_map(_own, self._arguments)
            observed.enter_context(within or nullcontext())
            loss = self._loss_of(self.model(*args, **kwargs))
            batch = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            try:
                yield Run(loss, logs, self.parameters, batch)
            finally:
                for log in logs.values():
                    log.inputs.clear()  # whose graph holds the tapes, which hold the observers and so the logs

    def gradients(
        self, setup: Setup, look: Look = StackObserver
    ) -> tuple[Gradients, dict[ReversibleSequence, StackLog]]:
        """The gradients of one run, and what was seen of each stack."""
        with self.run(setup, look) as run:
            return run.gradients(), run.logs

    def peak(self, setup: Setup, label: str) -> tuple[Peak, dict[str, int]]:
        """The peak of one run in live bytes, and the peak at each place that the run was at."""
        peaks = self.track(setup).peaks()
        where = max(peaks, key=lambda place: peaks[place], default="nowhere")
        return Peak(label, peaks.get(where, 0), where), peaks

    def track(self, setup: Setup) -> Course:
        """The live bytes in the course of one run, forward and backward."""
        course = Course()
        tracker = MemoryTracker([self.model, *self.parameters], events=course)
        with ExitStack() as hooks:
            for parameter in self.parameters:  # gradients are there in any mode, and are not counted
                hooks.callback(parameter.register_hook(tracker.ignore).remove)
            with self.run(setup, within=tracker, tell=course.go) as run:
                course.go("backward, after the stack")
                run.gradients()
        return course

    def _loss_of(self, output: Any) -> Tensor:
        self.output = (tuple(output.shape), output.nbytes) if isinstance(output, Tensor) else None
        loss = self._loss(output) if self._loss is not None else _in_a_sentence(default_loss, output)
        loss = _in_a_sentence(check_loss, loss)
        if not bool(torch.isfinite(loss)):
            raise ExaminationError(why_not_finite(float(loss.detach()), self._non_finite()))
        return loss

    def _non_finite(self) -> list[str]:
        """Run the model once more, to see where NaN or infinity starts."""
        with self.preserved(), first_non_finite(self.model) as where:
            args, kwargs = tree_map(_own, self._arguments)
            self.model(*args, **kwargs)
        return where


def _own(value: Any) -> Any:
    """A copy of a tensor in the batch: models have been seen to edit their masks."""
    return detached_leaf(value.clone()) if isinstance(value, Tensor) else value


def _in_a_sentence(function: Callable[[Any], Result], value: Any) -> Result:
    """The result of a function whose errors are sentences for the user."""
    try:
        return function(value)
    except ValueError as error:
        raise ExaminationError(str(error)) from None


def _steps(name: str, stack: ReversibleSequence) -> Iterator[tuple[Step, str]]:
    for i, block in enumerate(stack):
        for step in block.each_step():
            yield step, f"{name + ': ' if name else ''}block {i}, branch {step.name},"
