"""A budget's plan beside what people use without one: all stored, checkpoints, everything reversed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from retrograde._drive import drive
from retrograde._outputs import Outputs
from retrograde._plan import Plan
from retrograde._sequence import ReversibleSequence
from retrograde._streams import Streams

from ._costs import ChainCost, predict
from ._planner import Planned, driven_by, pareto, the_stack
from ._room import has_room
from ._sizes import show_size
from ._steps import least_seconds, mean_square, measured, planned_as, timed, undisturbed

_STORE, _EACH = "store", "checkpoint each block"
_STEADY = 0.1  # by how much a machine's speed may change between two measurements


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
    from 1, the machine has changed its speed in between (cores that others use, or heat), and ratios with it.
    """

    rows: tuple[Row, ...]
    chain: ChainCost
    slowdown: float = 1.0

    @cached_property
    def curve(self) -> tuple[Planned, ...]:
        """Searched for when it is drawn: one search for each of its points, which deep chains make felt."""
        return tuple(pareto(self.chain))

    def table(self) -> str:
        head = f"{'':<22} {'peak':>10} {'predicted':>10} {'time':>6} {'predicted':>9}  plan"
        lines = [head, *(_line(row) for row in self.rows)]
        if max(self.slowdown, 1 / self.slowdown) > 1 + _STEADY:
            lines.append(
                f"The machine changed its speed: storing everything took x{self.slowdown:.2f} of what it took when the "
                "plan was made. Predicted times are of before; run it again."
            )
        return "\n".join(lines)

    def plot(self, path: str | Path) -> Path:
        """Time against peak memory, as a picture."""
        from ._plot import draw

        return draw(self, Path(path))


def _line(row: Row) -> str:
    def peak(size: int | None, otherwise: str) -> str:
        return f"{otherwise if size is None else show_size(size):>10}"

    def ratio(value: float | None, width: int) -> str:
        return f"{'' if value is None else f'x{value:.2f}':>{width}}"

    measured_ = f"{peak(row.peak, 'no room')} {peak(row.predicted_peak, '')}"
    return f"{row.name:<22} {measured_} {ratio(row.ratio, 6)} {ratio(row.predicted_ratio, 9)}  {row.plan}"


def compare(
    model: nn.Module,
    batch: Any,
    planned: Planned,
    *,
    loss: Any = None,
    stack: ReversibleSequence | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Run steps of each kind for real, interleaved, and hold them against what was predicted."""
    chain, loss = planned.chain, loss or mean_square
    stack = the_stack(model) if stack is None else stack
    ways = _ways(planned)
    expected = {name: predict(chain, plan.memory) for name, plan in ways.items() if plan is not None}
    stored = expected[_STORE]
    in_segments = expected[_EACH].peak + stored.peak // math.isqrt(len(chain.blocks))  # at most
    needed = {name: expected[name].peak if name in expected else in_segments for name in ways}
    fitting = {name: plan for name, plan in ways.items() if has_room(model, needed[name])}
    peaks: dict[str, int] = {}
    with undisturbed(model):
        for i, (name, plan) in enumerate(fitting.items()):
            if progress is not None:
                progress(f"the peak of {name}", i, len(fitting))
            with _following(stack, plan):
                peaks[name] = measured(model, batch, loss=loss).peak
        following = {name: partial(_following, stack, plan) for name, plan in fitting.items()}
        seconds = least_seconds(following, partial(timed, model, batch, loss), progress)
    base = seconds.get(_STORE, stored.seconds)
    rows = [
        Row(
            name,
            "torch.utils.checkpoint" if plan is None else str(plan),
            peaks.get(name),
            seconds[name] / base if name in seconds else None,
            expected[name].peak if name in expected else None,
            expected[name].seconds / stored.seconds if name in expected else None,
        )
        for name, plan in ways.items()
    ]
    return Comparison(tuple(rows), chain, base / stored.seconds)


def _ways(planned: Planned) -> dict[str, Plan | None]:
    """By name, the plan of each way; None for checkpoints around √n blocks each, which no plan expresses."""
    chain = planned.chain
    uniform = chain.uniform()
    invertible = all("reverse" in block.modes for block in chain.blocks)
    ways: dict[str, Plan | None] = {
        _STORE: Plan(uniform["store"]),
        _EACH: Plan(uniform["checkpoint"]),
        "checkpoint √n": None,
    }
    if "reverse" in uniform:
        ways["reverse" if invertible else "reverse where possible"] = Plan(uniform["reverse"], chain.anchors)
    return {**ways, "this budget's plan": planned.plan}


@contextmanager
def _following(stack: ReversibleSequence, plan: Plan | None) -> Iterator[None]:
    with _in_segments(stack) if plan is None else planned_as(stack, plan):
        yield


@contextmanager
def _in_segments(stack: ReversibleSequence) -> Iterator[None]:
    """Run the stack as √n parts of √n blocks, each inside torch.utils.checkpoint."""
    blocks: list[Any] = list(stack.blocks)
    size = max(1, math.isqrt(len(blocks)))

    def segmented(plan: Plan, streams: Streams, context: Mapping[str, Any], hidden: set[int]) -> Outputs:
        def part(first: int, *given: Any) -> Outputs:
            some = blocks[first : first + size]
            wanted = {i - first for i in hidden}
            stored = Plan.uniform("store", len(some))
            return drive(some, stack.names, stored, range(len(some)), given, context, hidden=wanted)

        outputs = Outputs(streams, stack.names)
        for first in range(0, len(blocks), size):
            found = checkpoint(part, first, *outputs, use_reentrant=False)
            outputs.aux_by_block |= {first + i: losses for i, losses in found.aux_by_block.items()}
            outputs.hidden |= {first + i: states for i, states in found.hidden.items()}
            outputs = outputs.after(tuple(found))
        return outputs

    with driven_by(stack, segmented):
        yield
