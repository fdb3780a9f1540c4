"""One run of a user's model, forward and backward, under a plan and a remedy; what it gives is compared elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._block import Block
from retrograde._plan import Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde._step import Step
from retrograde._torch_private import tree_flatten, tree_unflatten

from ._branches import CopyingReader
from ._compare import noise_like
from ._memory import Event, MemoryTracker
from ._report import ExaminationError, Peak
from ._snapshot import parameters_of, unchanged
from ._watch import Look, Redirected, StackLog, Walks, Where

Loss = Callable[[Any], Tensor]
Plans = dict[ReversibleSequence, Plan]


@dataclass(frozen=True)
class Setup:
    """How the stacks run: their plans, and a wider dtype for their streams."""

    plans: Plans
    widen: Mapping[ReversibleSequence, torch.dtype] = field(default_factory=dict)


@dataclass
class Gradients:
    """The gradients of one run: of each parameter, and of what entered each stack."""

    parameters: dict[nn.Parameter, Tensor]
    inputs: dict[ReversibleSequence, list[Tensor]]


def default_loss(output: Any) -> Tensor:
    """The mean squared distance of all floating-point tensors in an output from fixed random numbers.

    Not their mean square itself: behind a normalisation that is a constant, which has no gradient to compare.
    """
    found = [v for v in tree_flatten(output)[0] if isinstance(v, Tensor) and v.is_floating_point()]
    if not found:
        raise ExaminationError(
            f"The model returned {type(output).__name__} without a floating-point tensor in it, of which no loss can "
            "be made. Give a loss: a function of the output that returns a scalar."
        )
    return torch.stack([_distance(t) for t in found]).sum()


def _distance(tensor: Tensor) -> Tensor:
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    (aim,) = noise_like([wide.new_empty(wide.shape[-1:])])  # one number a feature: a whole tensor would cost memory
    return (wide - aim.to(wide.dtype)).square().mean()


class Bench:
    """A model with its batch and loss, to be run again and again from the same state.

    Args:
        model: the user's model; it is left as it was found.
        args: the batch, by position.
        kwargs: the batch, by name.
        loss: makes a scalar of the model's output.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> None:
        self.model = model
        self.loss = loss or default_loss
        self._batch = (args, kwargs)
        self.stacks = {name: m for name, m in model.named_modules() if isinstance(m, ReversibleSequence)}
        self.steps = {step: words for name, stack in self.stacks.items() for step, words in _steps(name, stack)}
        self.copying: list[Step] = []  # those that must get copies of their sources, which they edit
        self._devices = {t.device for t in _tensors((args, kwargs, list(model.parameters())))}
        inner = [p for step in self.steps for p in parameters_of(step)]
        self.parameters = list(dict.fromkeys([*(p for p in model.parameters() if p.requires_grad), *inner]))

    def plans(self, memory: Memory | None = None) -> Plans:
        """A mode for every block that can have it; the stacks' own plans without one, or all reversed if none is."""
        if memory is None and self.reverses:
            return {stack: stack.memory for stack in self.stacks.values()}
        return {stack: _plan(stack, memory or "reverse") for stack in self.stacks.values()}

    @property
    def reverses(self) -> bool:
        """Whether any block is set to be reversed."""
        return any("reverse" in stack.memory.memory for stack in self.stacks.values())

    @contextmanager
    def run(
        self,
        setup: Setup,
        look: Look | None = None,
        *,
        walks: Walks = "all",
        within: AbstractContextManager[Any] | None = None,
        where: Where | None = None,
    ) -> Iterator[tuple[Tensor, dict[ReversibleSequence, StackLog]]]:
        """The loss of one forward pass, and what was seen of each stack. The model is put back at the end.

        Args:
            within: a context to run in, entered when all is prepared.
            where: is told where the run is.
        """
        with self.untouched(), ExitStack() as undo, torch.enable_grad():
            logs = {}
            for name, stack in self.stacks.items():
                watched = Redirected(stack, setup.plans[stack], look=look, walks=walks, widen=setup.widen.get(stack))
                watched.tell(where, self.label(name))
                logs[stack] = undo.enter_context(watched)
            args, kwargs = self._own_batch()
            undo.enter_context(within or nullcontext())
            loss = self.loss(self.model(*args, **kwargs))
            yield _checked(loss), logs

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """The model is put back at the end, whatever ran; steps that edit their sources get copies."""
        with unchanged(self.model, self._devices), ExitStack() as undo:
            for step in self.copying:
                undo.enter_context(CopyingReader(step))
            yield

    def label(self, name: str) -> str:
        """What to call a stack where its blocks are named: nothing if there is only one."""
        return f"{name} " if len(self.stacks) > 1 else ""

    def gradients(self, setup: Setup, look: Look | None = None) -> tuple[Gradients, dict[ReversibleSequence, StackLog]]:
        """The gradients of one run, and what was seen of each stack."""
        with self.run(setup, look) as (loss, logs):
            inputs = [t for log in logs.values() for t in log.inputs]
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, [*self.parameters, *inputs], allow_unused=True)
        by_parameter = {p: g for p, g in zip(self.parameters, found, strict=False) if g is not None}
        rest = iter(found[len(self.parameters) :])
        by_stack = {s: [g for _, g in zip(log.inputs, rest, strict=False) if g is not None] for s, log in logs.items()}
        return Gradients(by_parameter, by_stack), logs

    def peak(self, setup: Setup, label: str) -> tuple[Peak, dict[str, int]]:
        """The peak of one run in live bytes, and the peak at each place that the run was at."""
        places = _Places()
        self.track(setup, places, places.go)
        at = max(places.peaks, key=lambda place: places.peaks[place], default="nowhere")
        return Peak(label, places.peaks.get(at, 0), at), places.peaks

    def track(self, setup: Setup, events: list[Event], where: Where) -> None:
        """One run, forward and backward, whose changes of live bytes go to `events`, and its places to `where`."""
        tracker = MemoryTracker([self.model, *self.parameters], events=events)
        with ExitStack() as undo:
            for parameter in self.parameters:  # gradients are there in any mode, and are not counted
                undo.callback(parameter.register_hook(tracker.ignore).remove)
            with self.run(setup, walks="needed", within=tracker, where=where) as (loss, _):
                where("backward, after the stack")
                wanted: list[Any] = self.parameters or [t for t in _tensors(self._batch) if t.requires_grad]
                torch.autograd.grad(loss, wanted, allow_unused=True)

    def _own_batch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of the batch: models have been seen to edit their masks."""
        leaves, spec = tree_flatten(self._batch)
        own = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in leaves]
        args, kwargs = tree_unflatten(own, spec)
        return tuple(args), dict(kwargs)


class _Places(list[Event]):
    """Receives a tracker's events, and keeps the peak of live bytes at each place that the run was at."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self._at = "forward, before the stack"

    def go(self, place: str) -> None:
        self._at = place

    def append(self, event: Event) -> None:
        self.peaks[self._at] = max(self.peaks.get(self._at, 0), event.live)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ExaminationError(f"The loss must be a scalar tensor, but the loss function returned {given}.")
    if not bool(torch.isfinite(loss)):
        raise ExaminationError(
            f"The loss is {float(loss)}: the forward pass makes NaN or infinity outside of the reversible stacks, or "
            "the loss itself does. Look at the batch and at the layers before and after the stack."
        )
    if not loss.requires_grad:
        raise ExaminationError(
            "The loss does not depend on anything that requires grad, so that there is no backward pass to examine. "
            "Unfreeze a parameter, call the model without no_grad, and let the loss keep its graph."
        )
    return loss.reshape(())


def _plan(stack: ReversibleSequence, memory: Memory) -> Plan:
    blocks: list[Block] = stack._blocks()
    if memory != "reverse":
        return Plan((memory,) * len(blocks))
    modes: list[Memory] = ["reverse" if b.invertible else "checkpoint" for b in blocks]
    return Plan(tuple(modes))


def _steps(name: str, stack: ReversibleSequence) -> Iterator[tuple[Step, str]]:
    for i, block in enumerate(stack._blocks()):
        for step in block.each_step():
            yield step, f"{name + ': ' if name else ''}block {i}, branch {step.name},"


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in tree_flatten(value)[0] if isinstance(v, Tensor)]
