"""The work of `retrograde bench`: training steps of one model in each memory mode, interleaved in one process."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from retrograde.engine.preserve import preserve
from retrograde.measure.targets import Target
from retrograde.measure.timing import Progress
from retrograde.measure.training_step import step_peak, step_seconds
from retrograde.memory import Plan, mode_named
from retrograde.models import ReversibleLM
from retrograde.sequence import ReversibleSequence

STORE = "store"


@dataclass(frozen=True)
class Way:
    """One way to train a model: a plan for each stack, and whether the streams are on a grid.

    With `on_grid=None` the stacks keep their couplings.
    """

    name: str
    plans: Mapping[ReversibleSequence, Plan]
    on_grid: bool | None

    def set_up(self) -> bool:
        """Give the stacks their plans and couplings; returns whether the couplings changed."""
        changed = False
        for stack, plan in self.plans.items():
            if self.on_grid is not None and stack.exact != self.on_grid:
                stack.exact, changed = self.on_grid, True
            stack.memory = plan
        return changed


@dataclass(frozen=True)
class Row:
    """What a way costs: the peak of a step in bytes, its median seconds, and the quartiles of its ratio to storing."""

    name: str
    plan: str
    peak: int
    seconds: float
    low: float
    ratio: float
    high: float


def default_target() -> Target:
    """A small language model of the package, for users who give no target."""
    torch.manual_seed(0)
    model = ReversibleLM(256, width=64, depth=16, heads=4)
    tokens = torch.randint(256, (2, 129))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Target("retrograde.models.ReversibleLM", model, tokens[:, :-1], loss)


def ways_of(stacks: Sequence[ReversibleSequence]) -> list[Way]:
    """The ways to train any model, storing first."""
    where = "" if all(block.invertible for stack in stacks for block in stack) else ", where possible"
    on_grid = None if any(stack.exact for stack in stacks) else False
    ways = []
    for memory in (STORE, "checkpoint", "reverse", "selective"):
        reverses = mode_named(memory).needs_inverse
        plans = {stack: Plan.uniform(memory, list(stack)) for stack in stacks}
        if reverses:
            plans = {stack: replace(plan, anchors=stack.memory.anchors) for stack, plan in plans.items()}
        ways.append(Way(f"{memory}{where if reverses else ''}", plans, on_grid))
    if on_grid is False:
        reverse = ways[2]
        ways.append(Way(f"reverse exact{where}", reverse.plans, on_grid=True))
    return ways


def measure(target: Target, ways: Sequence[Way], rounds: int, progress: Progress) -> tuple[list[Row], list[str]]:
    """A row for each way, and a sentence for each that is impossible. The model is left as it was."""
    step = partial(step_seconds, target.model, target.batch, target.loss)
    peaks, refusals = {}, []
    with preserve(target.model):
        for i, way in enumerate(ways):
            progress(way.name, i, len(ways) * (rounds + 1))
            try:
                way.set_up()
                step()
                peaks[way.name] = step_peak(target.model, target.batch, target.loss)
            except (ValueError, TypeError) as error:  # streams that leave the grid, or whose dtype has none
                if not way.on_grid:
                    raise
                refusals.append(f"{way.name} is left out: {error}")
        ways = [way for way in ways if way.name in peaks]
        seconds = _seconds(ways, rounds, step, progress)
    return [_row(way, peaks[way.name], seconds) for way in ways], refusals


def _seconds(ways: Sequence[Way], rounds: int, step: Callable[[], float], progress: Progress) -> dict[str, list[float]]:
    """The seconds of a step in each way and round."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    order = random.Random(0)
    with _no_automatic_collection():
        for round_ in range(1, rounds + 1):
            gc.collect()  # between the steps, not in one
            for i, way in enumerate(order.sample(ways, len(ways))):
                progress(way.name, round_ * len(ways) + i, len(ways) * (rounds + 1))
                if way.set_up():
                    step()  # the first step with a new coupling takes longer
                seconds[way.name].append(step())
    return seconds


@contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """A context in which garbage is collected on call, from new objects only: in a large process, all take long."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _row(way: Way, peak: int, seconds: Mapping[str, Sequence[float]]) -> Row:
    ratios = [own / stored for own, stored in zip(seconds[way.name], seconds[STORE], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    plans = "; ".join(dict.fromkeys(map(str, way.plans.values())))
    return Row(way.name, plans, peak, statistics.median(seconds[way.name]), low, middle, high)
