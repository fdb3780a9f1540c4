"""The one comparison of ways to train a model: what each needs and takes, in real steps that are interleaved.

What `bench`, `plan`, `profile` and a conversion's report print of it is its rows. A new candidate (another memory mode,
a loss in chunks, tiles) is added in `memory_candidates`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from retrograde.engine.preserve import preserve
from retrograde.memory import Memory, Plan, mode_named
from retrograde.sequence import ReversibleSequence

from .loss import Loss
from .timing import Progress, Way, seconds_in_turn, silent
from .training_step import step_peak, step_seconds

MODES = ("store", "checkpoint", "reverse", "selective")
"""The memory modes that tools compare."""

STORE = "store"
PEAK = (
    "A peak is everything that a training step (forward and backward) allocates: activations, temporaries and the "
    "gradients of the parameters. Parameters, the batch and the optimiser's state come on top."
)
Plans = Mapping[ReversibleSequence, Memory]


@dataclass(frozen=True)
class Candidate:
    """One way to train a model, which is set up so inside of `apply()`.

    Attributes:
        changes_function: whether the network then computes another function.
        may_fail: whether it is left out, with a sentence, where the model does not allow it.
    """

    name: str
    plan: str
    apply: Way
    changes_function: bool = False
    may_fail: bool = False


@dataclass(frozen=True)
class Row:
    """One candidate: predicted, and measured in real steps where there is room for them.

    Times are ratios to storing everything: the median, and the quartiles. Peaks are as `PEAK` says.
    """

    name: str
    plan: str
    peak: int | None
    ratio: float | None
    predicted_peak: int | None = None
    predicted_ratio: float | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    changes_function: bool = False


@contextmanager
def following(plans: Plans, *, exact: bool | None = None) -> Iterator[None]:
    """A context in which stacks follow other plans; with `exact`, on the grid or off it."""
    with ExitStack() as restored:
        if exact is not None and any(stack.exact != exact for stack in plans):
            restored.enter_context(preserve(*plans))
            for stack in plans:
                stack.exact = exact
        for stack, memory in plans.items():
            restored.callback(setattr, stack, "memory", stack.memory)
            stack.memory = memory
        yield


def memory_candidates(stacks: Iterable[ReversibleSequence], modes: Sequence[str] = MODES) -> list[Candidate]:
    """The memory modes for all blocks of some stacks that can have them, and reversing on the exact grid."""
    stacks = list(stacks)
    where = "" if all(block.invertible for stack in stacks for block in stack) else ", where possible"
    inverts = any(block.invertible for stack in stacks for block in stack)
    candidates: list[Candidate] = []
    exact: list[Candidate] = []
    for mode in modes:
        plans = {stack: Plan.uniform(mode, list(stack)) for stack in stacks}
        name, reverses = mode, mode_named(mode).needs_inverse
        if reverses and not inverts:  # then it is its fallback under another name
            name = mode_named(mode).fallback
        elif reverses:
            plans = {stack: replace(plan, anchors=stack.memory.anchors) for stack, plan in plans.items()}
            name = f"{mode}{where}"
        if any(name == other.name for other in candidates):
            continue
        candidates.append(planned_candidate(name, plans))
        if mode == "reverse" and inverts and not any(stack.exact for stack in stacks):
            exact.append(replace(planned_candidate(f"reverse exact{where}", plans, exact=True), may_fail=True))
    return [*candidates, *exact]


def planned_candidate(name: str, plans: Mapping[ReversibleSequence, Plan], *, exact: bool | None = None) -> Candidate:
    """A candidate that follows plans."""
    words = "; ".join(dict.fromkeys(map(str, plans.values())))
    return Candidate(name, words, partial(following, plans, exact=exact))


def peaks_of(
    model: nn.Module,
    batch: Any,
    candidates: Sequence[Candidate],
    loss: Loss | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, int], list[str]]:
    """The peak of each candidate, and a sentence for each that is impossible. The model is left as it was."""
    peaks, refusals = {}, []
    with preserve(model):
        for i, candidate in enumerate(candidates):
            progress(f"the peak of {candidate.name}", i, len(candidates))
            try:
                with candidate.apply():
                    step_seconds(model, batch, loss)  # what a first run keeps for later ones does not count
                    peaks[candidate.name] = step_peak(model, batch, loss)
            except (ValueError, TypeError) as error:  # such as streams that leave the grid
                if not candidate.may_fail:
                    raise
                refusals.append(f"{candidate.name} is left out: {error}")
    return peaks, refusals


def compare(
    model: nn.Module,
    batch: Any,
    candidates: Sequence[Candidate],
    *,
    loss: Loss | None = None,
    turns: Iterable[int] | None = None,
    progress: Progress = silent,
    typical: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[list[Row], list[str]]:
    """A row for each candidate, and a sentence for each that is impossible. The model is left as it was.

    Args:
        turns: how often each is timed; by default as often as a few seconds allow.
        typical: the one time of several.
    """
    peaks, refusals = peaks_of(model, batch, candidates, loss, progress)
    candidates = [candidate for candidate in candidates if candidate.name in peaks]
    ways = {candidate.name: candidate.apply for candidate in candidates}
    with preserve(model):
        seconds = seconds_in_turn(ways, partial(step_seconds, model, batch, loss), turns, progress)
    rows = []
    for candidate in candidates:
        own = seconds[candidate.name]
        low, ratio, high = _quartiles([a / b for a, b in zip(own, seconds.get(STORE, own), strict=True)])
        row = Row(candidate.name, candidate.plan, peaks[candidate.name], ratio, low=low, high=high)
        rows.append(replace(row, seconds=typical(own), changes_function=candidate.changes_function))
    return rows, refusals


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
