"""A diagnosis as a picture: one column per stack, errors above and memory below, block by block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from retrograde.measure.pictures import new_figure, style_of, unit_of

from ._report import Diagnosis, StackReport

_DRIFT, _GRADIENT, _BAD = "#2b6cb0", "#b5305a", "#c53030"
_LEAST = 1e-17  # errors that are zero stand at the bottom: a logarithmic axis has no zero


def draw(diagnosis: Diagnosis, path: Path) -> Path:
    stacks = diagnosis.stacks
    figure = new_figure(max(8.0, 6.2 * len(stacks)), 6.6)
    axes = figure.subplots(2, len(stacks), squeeze=False, height_ratios=(3, 2), sharex="col")
    for column, stack in enumerate(stacks):
        _errors(axes[0][column], stack)
        _memory(axes[1][column], stack)
    figure.suptitle(f"{diagnosis.model}: {'healthy' if diagnosis.healthy else 'past tolerance'}", fontsize=13)
    figure.savefig(path, dpi=140)
    return path


def _errors(ax: Any, stack: StackReport) -> None:
    ax.set_yscale("log")
    for label, colour, marker, values in (
        ("drift of recomputed streams", _DRIFT, "o", [b.drift for b in stack.blocks]),
        ("gradient error", _GRADIENT, "s", [b.gradient_error for b in stack.blocks]),
    ):
        points = [
            (b.index, max(v, _LEAST)) for b, v in zip(stack.blocks, values, strict=True) if v and math.isfinite(v)
        ]
        if points:
            ax.plot(*zip(*points, strict=True), marker=marker, ms=4, lw=1.4, color=colour, label=label)
    ax.axhline(stack.floor, color="#555555", lw=1, ls=":", label=f"floor of {stack.dtype} ({stack.floor:.1e})")
    ax.axhline(stack.tolerance, color=_BAD, lw=1, ls="--", label=f"tolerance ({stack.tolerance:.2g})")
    if stack.first_bad is not None:
        index = stack.blocks[stack.first_bad].index
        ax.axvline(index, color=_BAD, lw=8, alpha=0.2, label=f"block {index}, the first past tolerance")
    flipped = [b for b in stack.blocks if b.flips and math.isfinite(b.error)]
    if flipped:
        heights = [max(b.error, _LEAST) for b in flipped]
        ax.scatter(
            [b.index for b in flipped], heights, marker="x", s=60, color="black", label="decisions flip", zorder=3
        )
    ax.set_ylabel("relative error")
    ax.set_title(f"{stack.name}: {len(stack.blocks)} blocks, {stack.dtype} streams", fontsize=10)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, loc="best")


def _memory(ax: Any, stack: StackReport) -> None:
    modes = stack.blocks[0].peak_bytes if stack.blocks else {}
    most = max((b.peak_bytes[mode] for b in stack.blocks for mode in modes), default=0)
    unit, size = unit_of(most)
    for mode in modes:
        values = [b.peak_bytes[mode] / size for b in stack.blocks]
        ax.plot([b.index for b in stack.blocks], values, color=style_of(mode)[0], lw=1.8, marker=".", label=mode)
    ax.set_ylim(bottom=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="block   (the backward pass goes from right to left)", ylabel=f"live memory at the block, {unit}")
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, loc="upper left", title="memory", title_fontsize=8)
