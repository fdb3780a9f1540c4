"""The figures of `retrograde bench`, as a table and as a picture of time against peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograde.measure.formatting import format_bytes
from retrograde.measure.pictures import Point, draw_time_over_memory
from retrograde.memory import MODES

from ._bench_run import STORE, Row

PLAN = "plan"


def table(rows: Sequence[Row], title: str) -> Any:
    """One line per way."""
    from rich.table import Table

    stored = next(row.peak for row in rows if row.name == STORE)
    lines = Table(title=title, title_justify="left", box=None)
    for name in ("", "time", "quartiles", "ms per step", "peak", "of store"):
        lines.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        quartiles = f"{row.low:.2f}-{row.high:.2f}"
        share = f"{100 * row.peak / stored:.0f}%"
        lines.add_row(
            row.name, f"x{row.ratio:.2f}", quartiles, f"{1e3 * row.seconds:.1f}", format_bytes(row.peak), share
        )
    return lines


def legend(rows: Sequence[Row]) -> list[str]:
    """What the names in the table mean, and the plan that was measured."""
    modes = {mode.name: mode.description for mode in MODES.values()}
    words = {row.name: next((modes[name] for name in modes if row.name.split(",")[0] == name), "") for row in rows}
    lines = [f"{name}: {description}." for name, description in words.items() if description]
    lines += [f"{row.name}: like reverse, with bit-identical gradients." for row in rows if "exact" in row.name]
    lines += ["Times are medians, as ratios to store; peaks are of everything that a training step allocates."]
    return ["", *lines, *(f"The plan: {row.plan}" for row in rows if row.name == PLAN)]


@dataclass(frozen=True)
class Picture:
    """Each way as a point, with the quartiles of its time."""

    rows: Sequence[Row]
    title: str

    def plot(self, path: Path) -> None:
        points = (Point(row.name, row.peak, row.ratio, (row.low, row.high)) for row in self.rows)
        draw_time_over_memory(path, self.title, points)
