"""The results of `retrograde demo`, as a picture in a file and as bars on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograde.measure.formatting import format_bytes
from retrograde.measure.pictures import TERMINAL_COLOURS, new_figure, style_of

from ._demo_run import MODES, Mode, Size, Training

WIDE = 44  # characters of the longest bar


def draw(path: Path, runs: Sequence[Training], peaks: dict[Mode, list[int]], size: Size) -> None:
    """Draw memory over depth on the left, loss curves on the right."""
    figure = new_figure(11.5, 4.6)
    left, right = figure.subplots(1, 2)
    _memory(left, peaks, size)
    _losses(right, runs, size)
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.legend(title="memory")
    figure.savefig(path, dpi=140)


def _memory(ax: Any, peaks: dict[Mode, list[int]], size: Size) -> None:
    for memory in MODES:
        colour, marker = style_of(memory)
        heights = [peak / 2**20 for peak in peaks[memory]]
        ax.plot(size.depths, heights, color=colour, marker=marker, lw=2, label=memory)
        ax.annotate(
            format_bytes(peaks[memory][-1]), (size.depths[-1], heights[-1]), xytext=(-6, 7), textcoords="offset points",
            ha="right", fontsize=9, color=colour,
        )  # fmt: skip
    ax.set(title="Activation memory at the peak of a step", xlabel="blocks", ylabel="MiB", xticks=size.depths)
    ax.set_ylim(0, 1.1 * max(map(max, peaks.values())) / 2**20)


def _losses(ax: Any, runs: Sequence[Training], size: Size) -> None:
    """The longest curve as a thin line, the shorter ones as markers, which lie on it where they are equal."""
    for run in sorted(runs, key=lambda run: -len(run.losses)):
        colour, marker = style_of(run.memory)
        steps = range(1, len(run.losses) + 1)
        if len(run.losses) == size.steps:
            ax.plot(steps, run.losses, color=colour, lw=1.6, label=run.memory)
            continue
        gap = max(1, size.compared // 12)
        shift = gap // 2 if run.memory == "checkpoint" else 0
        ax.plot(
            steps[shift::gap], run.losses[shift::gap], ls="", ms=6, zorder=3,
            marker=marker, color=colour, mec="black", mew=0.5, label=run.memory,
        )  # fmt: skip
    ax.axvline(size.compared, color="#555555", lw=1, ls=":")
    ax.annotate(
        f"compared to the bit\nup to step {size.compared}", (size.compared, 0.97), xycoords=("data", "axes fraction"),
        xytext=(6, 0), textcoords="offset points", va="top", fontsize=9, color="#555555",
    )  # fmt: skip
    ax.set(title=f"Training loss, {size.depth} blocks, one seed", xlabel="step", ylabel="nats per character")


def bars(peaks: dict[Mode, list[int]], size: Size) -> Any:
    """The memory over depth as a table with a bar per row."""
    from rich.table import Table
    from rich.text import Text

    most = max(max(of_mode) for of_mode in peaks.values())
    table = Table(box=None, title="Activation memory at the peak of a step", title_justify="left", padding=(0, 1))
    table.add_column("blocks", justify="right")
    table.add_column("memory")
    table.add_column("peak", justify="right")
    table.add_column("")
    for i, depth in enumerate(size.depths):
        for memory in MODES:
            peak = peaks[memory][i]
            bar = Text("█" * max(1, round(WIDE * peak / most)), style=TERMINAL_COLOURS[memory])
            table.add_row(str(depth) if memory == MODES[0] else "", memory, format_bytes(peak), bar)
    return table
