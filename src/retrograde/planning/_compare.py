"""A budget's plan beside what people use without one: everything stored, checkpoints, everything reversed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from retrograde.engine.checkpoint import CheckpointTape
from retrograde.engine.exactness import grid_placements
from retrograde.engine.preserve import preserve
from retrograde.measure.formatting import format_bytes
from retrograde.measure.free_memory import has_room
from retrograde.measure.loss import Loss
from retrograde.measure.pictures import Point, draw_time_over_memory
from retrograde.measure.stacks import the_stack
from retrograde.measure.timing import Progress, least_seconds, silent
from retrograde.measure.training_step import step_seconds
from retrograde.memory import CHECKPOINT, Plan
from retrograde.sequence import ReversibleSequence

from ._costs import ChainCost, predict
from ._measure import following, measured
from ._planner import Planned, pareto

_STORE, _EACH, _SEGMENTS = "store", "checkpoint each block", "checkpoint √n"
_PLAN = "this budget's plan"
_STEADY = 0.1  # by how much a machine's speed may change between two measurements
_PARTLY = " where possible"
_PEAK_OFF, _TIME_OFF = 0.05, 0.25  # by how much a measured figure may differ from the predicted one, relatively
_WORDS = {
    _STORE: "all activations are stored, as autograd does",
    _EACH: "the input of every block is saved, and the block runs again in the backward pass",
    _SEGMENTS: "the same for groups of √n of the n blocks, as with torch's checkpoint_sequential",
    "reverse": "the input of every block is recomputed from its output, and the block runs again",
}
_FIGURES = "Peaks are of everything that a training step allocates, including gradients; times are ratios to store."


@dataclass(frozen=True)
class Row:
    """One way to train the model: predicted, and measured in real steps where there is room for them.

    Times are ratios to storing everything: to what that took, or was predicted to take where it has no room.
    """

    name: str
    plan: str
    peak: int | None
    ratio: float | None
    predicted_peak: int | None = None
    predicted_ratio: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The measured ways to train a model, and the curve of the fastest plan at every budget.

    `slowdown` is the time that storing everything took here, as a ratio to what it took when the plan was made. Far
    from 1, the speed of the machine has changed in between (other processes, or heat), and the ratios with it.
    """

    rows: tuple[Row, ...]
    chain: ChainCost
    slowdown: float = 1.0
    budget: int | None = None

    @cached_property
    def curve(self) -> tuple[Planned, ...]:
        """Computed when it is drawn: each of its points is a search, which takes time for deep chains."""
        return tuple(pareto(self.chain))

    def table(self) -> str:
        head = f"{'':<22} {'peak':>10} {'predicted':>10} {'time':>6} {'predicted':>9}  plan"
        shown = {row.name.removesuffix(_PARTLY) for row in self.rows}
        words = [f"{name}: {what}" for name, what in _WORDS.items() if name in shown]
        lines = [head, *(_line(row) for row in self.rows), "", *words, _FIGURES, *self.disagreements()]
        if max(self.slowdown, 1 / self.slowdown) > 1 + _STEADY:
            lines.append(
                f"The speed of the machine changed: storing everything took x{self.slowdown:.2f} of the time that it "
                "took when the plan was made, on which the predictions are based. Run the command again."
            )
        return "\n".join(lines)

    def disagreements(self) -> list[str]:
        """A sentence for each figure whose prediction differs clearly from the measurement."""
        return [sentence for row in self.rows for sentence in _disagreements(row)]

    def broken_budget(self) -> str | None:
        """The sentence for a plan that took more than its budget when it was run; None if it did not."""
        peak = next((row.peak for row in self.rows if row.name == _PLAN), None)
        if peak is None or self.budget is None or peak <= self.budget:
            return None
        return (
            f"The plan breaks its budget: a real step peaked at {format_bytes(peak)} ({peak} bytes), over the "
            f"{format_bytes(self.budget)} of the budget. The model does something else in each step; give a smaller "
            "budget, or choose its memory by hand."
        )

    def plot(self, path: str | Path) -> Path:
        """Time over peak memory, as a picture: points are measured, the curve is predicted. Needs matplotlib."""
        title = "Peak and time of a training step: points are measured"
        points = filter(None, map(_point, self.rows))
        return draw_time_over_memory(Path(path), title, points, [(p.peak, p.ratio) for p in self.curve])


def _point(row: Row) -> Point | None:
    """What was measured of a way, or what was predicted if it was not run; None if it was neither."""
    if row.peak is not None and row.ratio is not None:
        return Point(row.name, row.peak, row.ratio)
    if row.predicted_peak is not None and row.predicted_ratio is not None:
        return Point(row.name, row.predicted_peak, row.predicted_ratio, is_measured=False)
    return None


def _line(row: Row) -> str:
    peak = "no room" if row.peak is None else format_bytes(row.peak)
    predicted = "" if row.predicted_peak is None else format_bytes(row.predicted_peak)
    ratio, predicted_ratio = ("" if r is None else f"x{r:.2f}" for r in (row.ratio, row.predicted_ratio))
    return f"{row.name:<22} {peak:>10} {predicted:>10} {ratio:>6} {predicted_ratio:>9}  {row.plan}"


def _disagreements(row: Row) -> Iterator[str]:
    if row.peak is not None and row.predicted_peak is not None and differ(row.peak, row.predicted_peak):
        peaks = f"{format_bytes(row.peak)}, where {format_bytes(row.predicted_peak)} was predicted"
        yield f"{row.name}: prediction and measurement disagree. The peak is {peaks}."
    ratio, predicted = row.ratio, row.predicted_ratio
    if ratio is not None and predicted is not None and differ(ratio, predicted, _TIME_OFF):
        ratios = f"x{ratio:.2f}, where x{predicted:.2f} was predicted"
        yield f"{row.name}: prediction and measurement disagree. The time is {ratios}."


def differ(measured: float, predicted: float, tolerance: float = _PEAK_OFF) -> bool:
    """Whether a measured figure is further from the predicted one than predictions of its kind are."""
    return abs(measured - predicted) > tolerance * abs(predicted)


def compare(
    model: nn.Module,
    batch: Any,
    planned: Planned,
    *,
    loss: Loss | None = None,
    stack: str | ReversibleSequence | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Run real steps in each way, interleaved, beside what was predicted. The arguments are those of `plan`."""
    chain, stack = planned.chain, the_stack(model, stack)
    if chain is None:
        raise ValueError("The plan is of a compiled model, measured in whole steps: there is no prediction to compare.")
    ways = _ways(planned, chain, stack)
    expected = {name: predict(chain, plan.memory) for name, plan in ways.items() if name != _SEGMENTS}
    stored = expected[_STORE]
    in_segments = expected[_EACH].peak + stored.peak // math.isqrt(len(chain.blocks))  # at most
    needed = {name: expected[name].peak if name in expected else in_segments for name in ways}
    fitting = {name: partial(following, stack, ways[name]) for name in ways if has_room(model, needed[name])}
    peaks: dict[str, int] = {}
    with preserve(model):
        for i, (name, way) in enumerate(fitting.items()):
            progress(f"the peak of {name}", i, len(fitting))
            with way():
                peaks[name] = measured(model, batch, loss=loss).peak
        seconds = least_seconds(fitting, partial(step_seconds, model, batch, loss), progress)
    base = seconds.get(_STORE, stored.seconds)
    rows = [
        Row(
            name,
            str(plan),
            peaks.get(name),
            seconds[name] / base if name in seconds else None,
            expected[name].peak if name in expected else None,
            expected[name].seconds / stored.seconds if name in expected else None,
        )
        for name, plan in ways.items()
    ]
    return Comparison(tuple(rows), chain, base / stored.seconds, planned.budget)


def _ways(planned: Planned, chain: ChainCost, stack: ReversibleSequence) -> dict[str, Plan]:
    """The plan of each way, by its name."""
    uniform = chain.uniform()
    ways = {_STORE: Plan(uniform["store"]), _EACH: Plan(uniform["checkpoint"])}
    if stack.keeps_last_graph:  # otherwise each layer runs under a tape of its own, as the recipe "unchanged" has it
        ways[_SEGMENTS] = _in_segments(stack)
    if "reverse" in uniform:
        is_whole = all("reverse" in block.modes for block in chain.blocks)
        ways["reverse" if is_whole else f"reverse{_PARTLY}"] = Plan(uniform["reverse"], chain.anchors)
    return {**ways, _PLAN: planned.plan}


class _SegmentTape(CheckpointTape):
    """A checkpoint of several blocks."""

    spans_blocks = True


def _in_segments(stack: ReversibleSequence) -> Plan:
    """Checkpoints of √n blocks each, as with `torch.utils.checkpoint.checkpoint_sequential`.

    Streams that are put on a grid again start a new segment: a tape knows of its steps only.
    """
    size = max(1, math.isqrt(len(stack)))
    name = f"checkpoint every {size} blocks" if size > 1 else "checkpoint every block"
    mode = replace(CHECKPOINT, name=name, make_tape=_SegmentTape, blocks_per_tape=size)
    placements = grid_placements(list(stack), range(len(stack)), stack.names)
    return Plan((mode,) * len(stack), frozenset(placements) - {0})
