"""The picture of a comparison: time against peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._compare import Comparison

_MARKS = {"store": "s", "checkpoint each block": "v", "checkpoint √n": "^", "reverse": "D"}


def draw(comparison: Comparison, path: Path) -> Path:
    """Draw the curve of the fastest plans, with what was measured as points."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("A picture needs matplotlib: pip install 'retrograde[plot]'.") from None
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    mebi = 2**20
    curve = comparison.curve
    axes.step([p.peak / mebi for p in curve], [p.ratio for p in curve], where="post", color="#2a6fdb", lw=1.5,
              label="fastest plan at each budget (predicted)")  # fmt: skip
    for row in comparison.rows:
        ours = row.name not in _MARKS
        axes.scatter(row.peak / mebi, row.ratio, s=90 if ours else 55, marker="*" if ours else _MARKS[row.name],
                     color="#d1495b" if ours else "#444444", zorder=3)  # fmt: skip
        axes.annotate(row.name, (row.peak / mebi, row.ratio), xytext=(7, 6), textcoords="offset points", fontsize=9)
    axes.set_xlabel("peak of one training step, MiB (points: measured)")
    axes.set_ylabel("time, ratio to storing everything")
    axes.margins(x=0.2, y=0.12)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
