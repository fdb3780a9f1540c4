"""A diagnosis as a picture: one column per stack, errors above and memory below, block by block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from retrograde.measure.pictures import DRIFT, FAULT, GRADIENT, new_figure, style_of, unit_of

from ._report import Diagnosis, StackReport

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
        ("drift of recomputed streams", DRIFT, "o", [b.drift for b in stack.blocks]),
        ("gradient error", GRADIENT, "s", [b.gradient_error for b in stack.blocks]),
    ):
        points = [
            (b.index, max(v, _LEAST)) for b, v in zip(stack.blocks, values, strict=True) if v and math.isfinite(v)
        ]
        if points:
            ax.plot(*zip(*points, strict=True), marker=marker, ms=4, lw=1.4, color=colour, label=label)
    errors = [e for block in stack.blocks for e in (block.drift, block.gradient_error) if e is not None]
    if errors and not any(errors):
        _nothing_to_show(ax, stack)
        return
    ax.axhline(stack.floor, color="#555555", lw=1, ls=":", label=f"floor of {stack.dtype} ({stack.floor:.1e})")
    ax.axhline(stack.tolerance, color=FAULT, lw=1, ls="--", label=f"tolerance ({stack.tolerance:.2g})")
    if stack.first_bad is not None:
        index = stack.blocks[stack.first_bad].index
        ax.axvline(index, color=FAULT, lw=8, alpha=0.2, label=f"block {index}, the first past tolerance")
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


def _nothing_to_show(ax: Any, stack: StackReport) -> None:
    """In the place of curves: no error is above 0, and a logarithmic axis cannot show that."""
    ax.set_yscale("linear")
    indices = [block.index for block in stack.blocks]
    ax.plot(indices, [0.0] * len(indices), color=DRIFT, marker="o", ms=4, lw=1.4, label="drift and gradient error: 0")
    words = f"Every recomputed stream and every gradient of the {len(indices)} blocks is bit-identical"
    ax.annotate(words, (0.5, 0.62), xycoords="axes fraction", ha="center", fontsize=10, color=DRIFT)
    ax.set(ylabel="relative error", ylim=(-0.5, 1), yticks=[0], yticklabels=["0"])
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
