"""What `retrograde bench` found, as a table and as a picture of time against peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograde.planning import show_size

from ._bench_run import STORE, Row


def table(rows: Sequence[Row], title: str) -> Any:
    """A line for each way."""
    from rich.table import Table

    stored = next(row.peak for row in rows if row.name == STORE)
    found = Table(title=title, title_justify="left", box=None)
    for name in ("", "time", "quartiles", "ms a step", "peak", "of store"):
        found.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        quartiles = f"{row.low:.2f}-{row.high:.2f}"
        share = f"{100 * row.peak / stored:.0f}%"
        found.add_row(row.name, f"x{row.ratio:.2f}", quartiles, f"{1e3 * row.seconds:.1f}", show_size(row.peak), share)
    return found


@dataclass(frozen=True)
class Picture:
    """Each way as a point, with the quartiles of its time."""

    rows: Sequence[Row]
    title: str

    def plot(self, path: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError("A picture needs matplotlib: pip install 'retrograde[plot]'.") from None
        figure = Figure(figsize=(7.5, 5.4), layout="constrained")
        ax = figure.subplots()
        for row in self.rows:
            peak = row.peak / 2**20
            spread = [[max(0.0, row.ratio - row.low)], [max(0.0, row.high - row.ratio)]]
            label = f"{row.name}: {show_size(row.peak)}, x{row.ratio:.2f}"
            ax.errorbar(peak, row.ratio, yerr=spread, fmt="o", ms=7, capsize=4, label=label)
        ax.set(title=self.title, xlabel="peak of one training step, MiB", ylabel="time, ratio to storing everything")
        ax.margins(x=0.06, y=0.15)
        ax.set_xlim(left=0)
        ax.grid(alpha=0.25)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, format=path.suffix[1:] or "png")
