"""The picture of a comparison: time against peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ._sizes import show_size

if TYPE_CHECKING:
    from ._compare import Comparison

_MEBI = 2**20
_STYLES = {
    "store": ("s", "#707070"),
    "checkpoint each block": ("v", "#d08c3c"),
    "checkpoint √n": ("^", "#8a5a1c"),
    "reverse": ("D", "#2b6cb0"),
    "reverse where possible": ("D", "#2b6cb0"),
}
_PLAN = ("*", "#c53030")


def draw(comparison: Comparison, path: Path) -> Path:
    """Draw the curve of the fastest plans, with what was measured as points, named below with their figures."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("A picture needs matplotlib: pip install 'retrograde[plot]'.") from None
    figure = Figure(figsize=(7.5, 5.6), layout="constrained")
    axes = figure.subplots()
    for row in comparison.rows:
        marker, colour = _STYLES.get(row.name, _PLAN)
        run = row.peak is not None
        peak, ratio = (row.peak, row.ratio) if run else (row.predicted_peak, row.predicted_ratio)
        if peak is None or ratio is None:
            continue
        axes.scatter(
            peak / _MEBI, ratio, marker=marker, s=170 if marker == "*" else 60, zorder=3, edgecolors=colour,
            facecolors=colour if run else "none",
            label=f"{row.name}: {show_size(peak)}, x{ratio:.2f}{'' if run else ' (predicted: no room)'}",
        )  # fmt: skip
    curve = comparison.curve
    axes.step([p.peak / _MEBI for p in curve], [p.ratio for p in curve], where="post", color="#2b6cb0", lw=1.5,
              label="fastest plan for each budget, predicted")  # fmt: skip
    axes.set_xlabel("peak of one training step, MiB")
    axes.set_ylabel("time, ratio to storing everything")
    axes.set_title("What a training step takes: points are measured", fontsize=11)
    axes.margins(x=0.06, y=0.12)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format=path.suffix[1:] or "png")
    return path
