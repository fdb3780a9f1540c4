"""What the pictures of all tools share: one colour per memory mode, the unit of an axis, time over peak memory.

The colours of memory modes are those of nothing else: parts of memory and errors have others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .formatting import format_bytes

_STYLES = {  # colour and marker of a way to train; what it is called starts with its memory mode
    "store": ("#7d7d7d", "o"),
    "checkpoint": ("#d08c3c", "s"),
    "checkpoint √n": ("#d08c3c", "D"),
    "reverse": ("#2b6cb0", "^"),
    "reverse exact": ("#2b6cb0", "v"),
    "selective": ("#2f855a", "P"),
    "offload": ("#805ad5", "X"),
}
_PLAN = ("#c53030", "*")  # of several modes
PARTS = ("#5ab4ac", "#d8c24a", "#d9899c", "#4c566a")  # of the memory of a step: before, saved, after, own
DRIFT, GRADIENT, FAULT = "#1b7f79", "#b5305a", "#c53030"
TERMINAL_COLOURS = {"store": "bright_black", "checkpoint": "yellow", "reverse": "blue"}  # the nearest that all have
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))
_MEBI = 1 << 20


def style_of(way: str) -> tuple[str, str]:
    """The colour and the marker of a memory mode, or of a way to train whose name starts with it."""
    names = [name for name in _STYLES if way.startswith(name)]
    return _STYLES[max(names, key=len)] if names else _PLAN


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, drawn without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib: pip install 'retrograde[plot]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def unit_of(most: int) -> tuple[str, int]:
    """The unit for an axis of bytes that goes up to `most`, and its size."""
    return next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])


class Point(NamedTuple):
    """A way to train: the peak of a step in bytes, its time as a ratio to storing everything, and its quartiles."""

    way: str
    peak: int
    ratio: float
    quartiles: tuple[float, float] | None = None
    is_measured: bool = True


def draw_time_over_memory(
    path: Path, title: str, points: Iterable[Point], plans: Sequence[tuple[int, float]] = ()
) -> Path:
    """Draw ways to train as points, named below with their figures; with a curve of peak and ratio of plans."""
    figure = new_figure(7.5, 5.6)
    axes = figure.subplots()
    for way, peak, ratio, quartiles, is_measured in points:
        colour, marker = style_of(way)
        spread = [[max(0.0, ratio - quartiles[0])], [max(0.0, quartiles[1] - ratio)]] if quartiles else None
        axes.errorbar(
            peak / _MEBI, ratio, yerr=spread, fmt=marker, ms=14 if marker == "*" else 8, capsize=4,
            color=colour, mfc=colour if is_measured else "none",
            label=f"{way}: {format_bytes(peak)}, x{ratio:.2f}{'' if is_measured else ' (predicted: no room)'}",
        )  # fmt: skip
    if plans:
        peaks, ratios = [peak / _MEBI for peak, _ in plans], [ratio for _, ratio in plans]
        axes.step(peaks, ratios, where="post", color=_PLAN[0], label="fastest plan for each budget, predicted")
    axes.set(title=title, xlabel="peak of one training step, MiB", ylabel="time, ratio to storing everything")
    axes.margins(x=0.06, y=0.12)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, format=path.suffix[1:] or "png")
    return path
