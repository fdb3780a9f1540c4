"""The work of `retrograde bench`: training steps of one model in each memory mode, interleaved in one process."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrograde._plan import INVERTING, Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde.models import ReversibleLM
from retrograde.planning import measured
from retrograde.planning._measure import untouched
from retrograde.planning._steps import mean_square, timed

from ._target import Target

STORE = "store"
Tell = Callable[[str, int, int], None]  # what, how many are done, of how many


@dataclass(frozen=True)
class Way:
    """One way to train a model: a plan for each stack, and whether the streams are put on a grid for it."""

    name: str
    plans: Mapping[ReversibleSequence, Plan]
    grid: bool = False


@dataclass(frozen=True)
class Row:
    """What a way costs: bytes at the peak of a step, and seconds as a ratio to storing, in each round."""

    name: str
    plan: str
    peak: int
    seconds: float
    low: float
    ratio: float
    high: float


def own_model() -> Target:
    """A small language model of the package, for users who name none."""
    torch.manual_seed(0)
    model = ReversibleLM(256, width=64, depth=16, heads=4)
    tokens = torch.randint(256, (2, 129))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Target("retrograde.models.ReversibleLM", model, (tokens[:, :-1],), {}, loss)


def ways_of(stacks: Sequence[ReversibleSequence]) -> list[Way]:
    """What can be done with any model, storing first."""
    whole = all(block.invertible for stack in stacks for block in stack._blocks())
    where = "" if whole else ", where possible"
    found = [
        Way(STORE, _everywhere(stacks, "store")),
        Way("checkpoint", _everywhere(stacks, "checkpoint")),
        Way(f"reverse{where}", _everywhere(stacks, "reverse")),
        Way(f"partial{where}", _everywhere(stacks, "partial")),
    ]
    if not any(stack.exact for stack in stacks):
        found.append(Way(f"reverse exact{where}", _everywhere(stacks, "reverse"), grid=True))
    return found


def _everywhere(stacks: Sequence[ReversibleSequence], memory: Memory) -> dict[ReversibleSequence, Plan]:
    """A mode for every block that can have it; those that cannot be inverted are checkpointed."""
    inverts = memory in INVERTING

    def plan(stack: ReversibleSequence) -> Plan:
        modes = [memory if block.invertible or not inverts else "checkpoint" for block in stack._blocks()]
        return Plan(tuple(modes), stack.memory.anchors if inverts else frozenset())

    return {stack: plan(stack) for stack in stacks}


class Bench:
    """A model, run in one way after the other.

    Args:
        target: the model with its batch and loss.
        stacks: its reversible stacks.
    """

    def __init__(self, target: Target, stacks: Sequence[ReversibleSequence]) -> None:
        self.target, self.stacks = target, stacks
        self.batch: Any = target.kwargs or target.args
        self.loss = target.loss or mean_square
        self._grid = False

    def measure(self, ways: Sequence[Way], rounds: int, tell: Tell) -> tuple[list[Row], list[str]]:
        """A row for each way, and a sentence for each that is impossible. The model is left as it was."""
        total = len(ways) * (rounds + 1)
        with untouched(self.target.model), self._put_back(), _old_objects_left_alone():
            peaks, refused = self._peaks(ways, lambda name, i: tell(name, i, total))
            ways = [way for way in ways if way.name in peaks]
            seconds: dict[str, list[float]] = {way.name: [] for way in ways}
            order = random.Random(0)
            for round_ in range(1, rounds + 1):
                gc.collect()  # between the steps, and not in one
                for i, way in enumerate(order.sample(ways, len(ways))):
                    tell(way.name, round_ * len(ways) + i, total)
                    seconds[way.name].append(self._seconds(way))
        return [_row(way, peaks[way.name], seconds) for way in ways], refused

    def _peaks(self, ways: Sequence[Way], tell: Callable[[str, int], None]) -> tuple[dict[str, int], list[str]]:
        peaks, refused = {}, []
        for i, way in enumerate(ways):
            tell(way.name, i)
            try:
                self._take(way)
                peaks[way.name] = int(measured(self.target.model, self.batch, loss=self.loss).peak)
            except ValueError as error:
                if not way.grid:
                    raise
                refused.append(f"{way.name} is left out: {error}")
        return peaks, refused

    def _seconds(self, way: Way) -> float:
        if self._take(way):
            timed(self.target.model, self.batch, self.loss)  # a new coupling is learnt in its first step
        gc.disable()
        try:
            return timed(self.target.model, self.batch, self.loss)
        finally:
            gc.enable()

    def _take(self, way: Way) -> bool:
        """Set the stacks up; whether their couplings changed."""
        changed, self._grid = self._grid != way.grid, way.grid
        for stack, plan in way.plans.items():
            if changed:
                stack.exact = way.grid
            stack.memory = plan
        return changed

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        before = [(stack, stack.memory) for stack in self.stacks]
        couplings = [(s, s.coupling) for stack in self.stacks for b in stack._blocks() for s in b.each_step()]
        try:
            yield
        finally:
            for stack, memory in before:
                stack.memory = memory
            for step, coupling in couplings:
                step.couple(coupling)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Garbage is looked for among the objects made from here on: a process with many others takes long to search."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _row(way: Way, peak: int, seconds: Mapping[str, Sequence[float]]) -> Row:
    ratios = [own / stored for own, stored in zip(seconds[way.name], seconds[STORE], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    plans = "; ".join(dict.fromkeys(map(str, way.plans.values())))
    return Row(way.name, plans, peak, statistics.median(seconds[way.name]), low, middle, high)
