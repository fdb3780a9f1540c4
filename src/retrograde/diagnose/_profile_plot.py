"""A memory profile as a picture and as a page: one column per mode, memory over time above and by block below."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from retrograde.measure.formatting import format_bytes
from retrograde.measure.pictures import FAULT, PARTS, new_figure, style_of, unit_of

from ._profile import KINDS, ModeProfile, Profile

_POINTS = 3000  # of a timeline that are drawn

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Memory of {model}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }}
svg {{ width: 100%; min-width: 40em; height: auto }} div {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: .5em 0 }}
td, th {{ padding: .2em .8em; text-align: left; border-bottom: 1px solid #ddd }}
td:first-child {{ text-align: right; white-space: nowrap }}
</style></head><body>
<h1>Memory of a training step of {model}</h1>
<p>Bytes of live tensors besides parameters, their gradients and the batch. Forward they go up, backward down.</p>
<div>{picture}</div>
{modes}
</body></html>
"""


def draw(profile: Profile, path: Path) -> Path:
    _figure(profile).savefig(path, dpi=140)
    return path


def page(profile: Profile, path: Path) -> Path:
    picture = io.StringIO()
    _figure(profile).savefig(picture, format="svg")
    svg = picture.getvalue()
    modes = "\n".join(_section(profile, mode) for mode in profile.modes)
    text = _PAGE.format(model=html.escape(profile.model), picture=svg[svg.index("<svg") :], modes=modes)
    path.write_text(text, encoding="utf-8")
    return path


def _section(profile: Profile, mode: ModeProfile) -> str:
    rows = "".join(
        f"<tr><td>{format_bytes(part.bytes)}</td><td>{part.kind}</td><td>{html.escape(part.made)}</td>"
        f"<td>{html.escape(', '.join(part.operators))}</td></tr>"
        for part in mode.parts[:8]
    )
    return (
        f"<h2>memory = {html.escape(repr(mode.memory))}: {format_bytes(mode.peak)} at {html.escape(mode.where)}</h2>"
        f"<p><b>{html.escape(profile.sentences[mode.memory])}</b> {html.escape(profile.advice[mode.memory])}</p>"
        f"<div><table><tr><th>at the peak</th><th>what</th><th>made</th><th>operators</th></tr>{rows}</table></div>"
    )


def _figure(profile: Profile) -> Any:
    count = len(profile.modes)
    figure = new_figure(max(6.0, 4.9 * count), 6.6)
    axes = figure.subplots(2, count, squeeze=False, height_ratios=(3, 2), sharey="row")
    most = max((mode.peak for mode in profile.modes), default=1)
    unit, size = unit_of(most)
    for column, mode in enumerate(profile.modes):
        _over_time(axes[0][column], mode, size)
        _by_block(axes[1][column], mode, size)
    axes[0][0].set(ylabel=f"live memory, {unit}", ylim=(0, 1.28 * most / size))
    axes[1][0].set_ylabel(f"by block, {unit}")
    axes[0][-1].legend(fontsize=8, loc="upper right")
    axes[1][-1].legend(fontsize=8, loc="upper right")
    figure.suptitle(f"Memory of a training step of {profile.model}", fontsize=13)
    return figure


def _over_time(ax: Any, mode: ModeProfile, size: int) -> None:
    """Areas one above another; the peak is always drawn, whatever points are left out."""
    count = len(mode.timeline)
    every = max(1, count // _POINTS)
    chosen = sorted({*range(0, count, every), *([mode.top] if count else [])})
    heights = [[mode.timeline[i][k] / size for i in chosen] for k in range(len(KINDS))]
    ax.stackplot(chosen, heights, colors=PARTS, labels=KINDS, step="post", linewidth=0)
    ax.axvline(mode.turn, color="#555555", lw=1, ls=":")
    ax.annotate("backward →", (mode.turn, 0.985), xycoords=("data", "axes fraction"), xytext=(4, 0),
                textcoords="offset points", va="top", fontsize=8, color="#555555")  # fmt: skip
    late = mode.top > 0.6 * count
    ax.vlines(mode.top, 0, mode.peak / size, color=FAULT, lw=0.8, zorder=3)  # a peak may be too brief to be seen
    ax.plot([mode.top], [mode.peak / size], marker="v", color=FAULT, ms=7, clip_on=False, zorder=4)
    ax.annotate(
        f"{format_bytes(mode.peak)}\n{mode.where}", (mode.top, mode.peak / size), xytext=(-7 if late else 7, 5),
        textcoords="offset points", fontsize=8.5, color=FAULT, ha="right" if late else "left", zorder=4,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
    )  # fmt: skip
    ax.set_title(f'memory="{mode.memory}"', fontsize=11, color=style_of(mode.memory)[0], fontweight="bold")
    ax.set(xlabel="tensors made and freed, in order", xlim=(0, max(1, count)))
    ax.grid(alpha=0.2)


def _by_block(ax: Any, mode: ModeProfile, size: int) -> None:
    numbers = range(len(mode.blocks))
    ax.bar(
        numbers,
        [b.peak / size for b in mode.blocks],
        color=style_of(mode.memory)[0],
        alpha=0.75,
        label="peak, going backward",
    )
    ax.bar(numbers, [b.saved / size for b in mode.blocks], color=PARTS[1], width=0.5, label="saved, going forward")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("block")
    ax.grid(alpha=0.2, axis="y")
