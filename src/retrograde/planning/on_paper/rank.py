"""One rank of a job, without values: its training step in any memory mode, counted in bytes and operators.

NOTE [What a rank's memory consists of]
 At the moment of the peak: `parameters` (with buffers), `gradients` (of parameters), the `optimizer`'s state,
 `activations` (the batch, and what the forward pass left for the backward pass), `communication` (parameters that
 FSDP2 gathered, DDP's buckets), and `temporaries`: everything else, such as recomputed activations, gradients of
 activations, and what an optimiser's step needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from retrograde.fused_optimizer import FusedOptimizer
from retrograde.measure.batches import arguments, tensors_in
from retrograde.measure.memory_tracker import Event, MemoryTracker, storage_bytes
from retrograde.measure.stacks import stacks_of
from retrograde.measure.targets import Target
from retrograde.measure.training_step import loss_of
from retrograde.memory import Memory

from .fake_session import refusing_values
from .jobs import GivenOptimizer, Job
from .operators import NO_TIME, OperatorClock, OperatorCosts, Seconds, transfer_seconds
from .sharding import bucket_bytes, sharded

_GATHERED = "resize_"  # how FSDP2 allocates the parameters that it gathers


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank at its peak, by what they are for. See NOTE [What a rank's memory consists of].

    `moment` is when the peak is: "forward", "backward" or "optimiser step".
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    temporaries: int
    moment: str

    @property
    def peak(self) -> int:
        parts = self.parameters + self.gradients + self.optimizer + self.activations
        return parts + self.communication + self.temporaries


@dataclass(frozen=True)
class Traffic:
    """What one rank exchanges with others in a step: how often, how many bytes it receives, and how long that takes."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    bytes: int = 0
    seconds: Seconds = NO_TIME


@dataclass(frozen=True)
class StepCost:
    """One training step of one rank.

    Attributes:
        memory: at the peak of the whole step.
        step_peak: the peak of forward and backward alone.
        operators: the time of the operators of forward and backward.
        compute: the same with the optimiser's step.
        seconds: the time of the step, with what is exchanged.
        flops: of all matrix products, recomputed ones included.
        unlisted: dtypes of matrix products whose rate the device does not list.
    """

    memory: RankMemory
    step_peak: int
    operators: Seconds
    compute: Seconds
    seconds: Seconds
    traffic: Traffic
    flops: int
    unlisted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OptimizerCost:
    """An optimiser's state, and its step: the bytes it needs in addition, and its time."""

    state: int
    temporaries: int
    seconds: Seconds


class Rank:
    """The first rank of a job, ready to train in any memory mode."""

    def __init__(self, job: Job, target: Target, mesh: Any, optimizer: GivenOptimizer | None) -> None:
        self.job = job
        self.batch = target.batch
        self._loss = target.loss
        self.model = sharded(target.model, job, mesh)
        self.stacks = list(stacks_of(self.model).values())
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._trained = list(trained.values())
        self._fused = self._fused_optimizer(trained, optimizer)
        self._buckets = bucket_bytes(self.model) if job.shard == "ddp" else 0
        self.optimizer = _optimizer_cost(job, trained, optimizer)
        self.parameters = storage_bytes([*self.model.parameters(), *self.model.buffers()])
        # Later steps find what a first one made: gathered parameters, and how far a replay has to go.
        self.step(["checkpoint"] * len(self.stacks))

    def _fused_optimizer(
        self, trained: Mapping[str, nn.Parameter], given: GivenOptimizer | None
    ) -> FusedOptimizer | None:
        """The optimiser that steps during the backward pass, if the job has such a one; with its state."""
        if not self.job.is_fused(given):
            return None
        fused = self.job.make_optimizer(trained, given)
        assert isinstance(fused, FusedOptimizer)
        _fill_gradients(trained.values())
        with OperatorClock(self.job.device):
            fused.step()
        fused.zero_grad()
        return fused

    def step(self, memories: Sequence[Memory]) -> StepCost:
        """One step, with these memory modes of the model's stacks."""
        before = [stack.memory for stack in self.stacks]
        try:
            for stack, memory in zip(self.stacks, memories, strict=True):
                stack.memory = memory
            return self._step()
        finally:
            for stack, memory in zip(self.stacks, before, strict=True):
                stack.memory = memory

    def _step(self) -> StepCost:
        self.model.zero_grad()
        if self._adds_up:
            _fill_gradients(self._trained)
        earlier = storage_bytes([p.grad for p in self._trained if p.grad is not None])
        events: list[Event] = []
        sums: list[int] = []
        clock = OperatorClock(self.job.device, on_sum=lambda: sums.append(len(events)))
        ignored: list[Tensor | nn.Module] = [self.model, *tensors_in(arguments(self.batch)), *self._state()]
        with refusing_values("The training step"), MemoryTracker(ignore=ignored, events=events) as memory, clock:
            with memory.phase("forward"), self.job.autocast():
                waiting = [loss_of(self.model, self.batch, self._loss) for _ in range(self.job.in_flight - 1)]
                clock.costs = OperatorCosts()  # from here on those of one micro-batch
                loss = loss_of(self.model, self.batch, self._loss)
            forward = len(events)
            with memory.phase("backward"):
                loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            del waiting
            numbers = memory.numbers(*gradients) if self._fused is None else set()
        cost = self._cost(_added_in_place(events, sums), forward, numbers, earlier, clock.costs)
        if self._fused is not None:
            self._fused.step()  # ends its round
        self.model.zero_grad()
        return cost

    @property
    def _adds_up(self) -> bool:
        """Whether gradients of earlier micro-batches are there already while a pipeline is full."""
        return self.job.shard == "pipeline" and self.job.batches > 1

    def _cost(
        self, events: list[Event], forward: int, gradients: set[int], earlier: int, costs: OperatorCosts
    ) -> StepCost:
        at_peak = max(range(len(events)), key=lambda i: events[i].live)
        alive, left = _alive(events[: at_peak + 1]), _alive(events[:forward])
        parts = dict.fromkeys(("gradients", "communication", "activations", "temporaries"), 0)
        for number, (size, operator) in alive.items():
            parts[_part_of(number, operator, gradients, left)] += size
        batch = storage_bytes(tensors_in(arguments(self.batch)))
        parts["activations"] += batch
        parts["communication"] += self._buckets
        parts["gradients"] += earlier
        memory = RankMemory(self.parameters, optimizer=self.optimizer.state, moment=events[at_peak].phase, **parts)
        stepping = self._while_stepping(batch)
        traffic = self._traffic(costs)
        operators = self._of_all_batches(costs.seconds)
        compute = operators + (self.optimizer.seconds if self._fused is None else NO_TIME)
        return StepCost(
            max(memory, stepping, key=lambda m: m.peak),
            memory.peak,
            operators,
            compute,
            _together(compute, traffic.seconds, overlapping=self.job.shard != "tensor"),
            traffic,
            costs.flops * (self.job.batches if self.job.shard == "pipeline" else 1),
            frozenset(costs.unlisted),
        )

    def _of_all_batches(self, seconds: Seconds) -> Seconds:
        """The time of a step's micro-batches, and of those during which a pipeline fills and empties."""
        if self.job.shard != "pipeline":
            return seconds
        return Seconds(*(value * (self.job.batches + self.job.ranks - 1) for value in seconds))

    def _while_stepping(self, batch: int) -> RankMemory:
        """The memory while the optimiser steps; a fused one does so in the backward pass."""
        gradients = 0 if self._fused is not None else storage_bytes(self._trained)
        return RankMemory(
            self.parameters, gradients, self.optimizer.state, batch, self._buckets, self.optimizer.temporaries,
            "optimiser step",
        )  # fmt: skip

    def _traffic(self, costs: OperatorCosts) -> Traffic:
        if self.job.shard == "ddp":
            size = 2 * self._buckets * (self.job.ranks - 1) // self.job.ranks
            seconds = transfer_seconds(self.job.device, size, range(self.job.ranks))
            return Traffic(all_reduces=_buckets_of(self._buckets), bytes=size, seconds=seconds)
        kinds = [c.kind for c in costs.collectives]
        seconds = NO_TIME
        for each in costs.collectives:
            seconds += each.seconds
        return Traffic(
            kinds.count("all-gather"),
            kinds.count("reduce-scatter"),
            kinds.count("all-reduce"),
            sum(c.bytes for c in costs.collectives),
            seconds,
        )

    def _state(self) -> list[Tensor]:
        """The state of a fused optimiser, which is part of the step."""
        return _tensors_of_state(self._fused) if self._fused is not None else []


def _optimizer_cost(job: Job, parameters: Mapping[str, Tensor], given: GivenOptimizer | None) -> OptimizerCost:
    """Step an optimiser of these parameters twice: it makes its state in the first step."""
    copies = {name: nn.Parameter(_local(p).detach()) for name, p in parameters.items()}
    own, optimizer = list(copies.values()), job.make_optimizer(copies, given)
    with refusing_values("The optimiser's step"):
        _fill_gradients(own)
        with OperatorClock(job.device):
            optimizer.step()
        state = _tensors_of_state(optimizer)
        _fill_gradients(own)
        ignored = [*own, *(p.grad for p in own if p.grad is not None), *state]
        with MemoryTracker(ignore=ignored) as memory, OperatorClock(job.device) as clock:
            optimizer.step()
    return OptimizerCost(storage_bytes(state), memory.peak, clock.costs.seconds)


def _tensors_of_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def _fill_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank has."""
    part: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part


def _part_of(number: int, operator: str, gradients: set[int], left: dict[int, tuple[int, str]]) -> str:
    if number in gradients:
        return "gradients"
    if operator == _GATHERED:
        return "communication"
    return "activations" if number in left else "temporaries"


def _added_in_place(events: list[Event], sums: Sequence[int]) -> list[Event]:
    """The events as they are without a dispatch mode: autograd adds into a gradient that it has for itself.

    It has it for itself if it frees it right after the sum; then it is the sum that the memory belonged to.
    """
    for i in sums:
        if i + 1 < len(events) and events[i].change == -events[i + 1].change > 0:
            before = events[i].live - events[i].change
            events[i], events[i + 1] = events[i]._replace(live=before), events[i + 1]._replace(live=before)
    return events


def _alive(events: Sequence[Event]) -> dict[int, tuple[int, str]]:
    """The storages that are alive after some events: their bytes, and what made them."""
    alive: dict[int, tuple[int, str]] = {}
    for change, _, storage, operator, _ in events:
        size = alive.get(storage, (0, ""))[0] + change
        if size:
            alive[storage] = size, operator
        else:
            del alive[storage]
    return alive


def _buckets_of(size: int) -> int:
    """How many buckets DDP makes: one of 1 MiB, then of 25 MiB each."""
    return 1 + -(-max(0, size - 2**20) // (25 * 2**20))


def _together(compute: Seconds, exchange: Seconds, *, overlapping: bool) -> Seconds:
    """At best and likely, the exchange is hidden behind the operators where it can be; at worst it is not."""
    if not overlapping:
        return compute + exchange
    return Seconds(
        max(compute.best, exchange.best), max(compute.likely, exchange.likely), compute.worst + exchange.worst
    )
