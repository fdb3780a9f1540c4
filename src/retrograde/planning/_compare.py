"""A budget's plan beside what people use without one: all stored, checkpoints, everything reversed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from retrograde._drive import drive
from retrograde._outputs import Outputs
from retrograde._plan import Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde._streams import Streams

from ._costs import predict
from ._planner import Planned, driven_by, measured, pareto
from ._sizes import show_size


@dataclass(frozen=True)
class Row:
    """One way to train the model: predicted, and measured in a real step. Times are ratios to storing everything."""

    name: str
    plan: str
    peak: int
    ratio: float
    predicted_peak: int | None = None
    predicted_ratio: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The measured ways to train a model, and the curve of the fastest plan at every budget."""

    rows: tuple[Row, ...]
    curve: tuple[Planned, ...]

    def table(self) -> str:
        head = f"{'':<22} {'peak':>10} {'predicted':>10} {'time':>6} {'predicted':>9}  plan"
        return "\n".join([head, *(_line(row) for row in self.rows)])

    def plot(self, path: str | Path) -> Path:
        """Time against peak memory, as a picture."""
        from ._plot import draw

        return draw(self, Path(path))


def _line(row: Row) -> str:
    peak = "" if row.predicted_peak is None else show_size(row.predicted_peak)
    ratio = "" if row.predicted_ratio is None else f"x{row.predicted_ratio:.2f}"
    return f"{row.name:<22} {show_size(row.peak):>10} {peak:>10} {f'x{row.ratio:.2f}':>6} {ratio:>9}  {row.plan}"


def compare(
    model: nn.Module,
    batch: Any,
    planned: Planned,
    *,
    loss: Any = None,
    stack: ReversibleSequence,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Run a step of each kind for real, interleaved, and hold it against what was predicted."""
    depth, before = len(planned.chain.blocks), stack.memory
    ways = _ways(planned, depth)
    found: dict[str, list[Any]] = {name: [] for name in ways}
    rounds = 3
    try:
        for round_ in range(rounds):
            for i, (name, plan) in enumerate(ways.items()):
                if progress is not None:
                    progress(name, round_ * len(ways) + i, rounds * len(ways))
                found[name].append(_measured(model, batch, loss, stack, plan))
    finally:
        stack.memory = before
    best = {name: (min(f.peak for f in each), min(f.seconds for f in each)) for name, each in found.items()}
    rows = [_row(name, plan, *best[name], best["store"][1], planned) for name, plan in ways.items()]
    return Comparison(tuple(rows), tuple(pareto(planned.chain)))


def _ways(planned: Planned, depth: int) -> dict[str, Plan | None]:
    """By name, the plan of each way; None for checkpoints around √n blocks each, which no plan expresses."""
    anchors = planned.chain.anchors
    invertible = all("reverse" in block.modes for block in planned.chain.blocks)
    reverse: tuple[Memory, ...] = tuple(
        "reverse" if "reverse" in block.modes else "checkpoint" for block in planned.chain.blocks
    )
    return {
        "store": Plan.uniform("store", depth),
        "checkpoint each block": Plan.uniform("checkpoint", depth),
        "checkpoint √n": None,
        "reverse" if invertible else "reverse where possible": Plan(reverse, anchors),
        "this budget's plan": planned.plan,
    }


def _measured(model: nn.Module, batch: Any, loss: Any, stack: ReversibleSequence, plan: Plan | None) -> Any:
    if plan is None:
        with _in_segments(stack):
            return measured(model, batch, loss=loss)
    stack.memory = plan
    return measured(model, batch, loss=loss)


def _row(name: str, plan: Plan | None, peak: int, seconds: float, stored: float, planned: Planned) -> Row:
    if plan is None:
        return Row(name, "torch.utils.checkpoint", peak, seconds / stored)
    chain = planned.chain
    expected = predict(chain, plan.memory)
    base = predict(chain, ["store"] * len(chain.blocks)).seconds
    return Row(name, str(plan), peak, seconds / stored, expected.peak, expected.seconds / base)


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
