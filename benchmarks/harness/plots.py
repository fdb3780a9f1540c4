"""Pictures for the report: time against memory, memory against depth, gradient error against depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograde.measure.pictures import style_of

from .contenders import REVERSE
from .results import Comparison, GradientErrors, Growth, Results
from .verdict import CONTENDERS, rivals_in

COLOURS = {  # as in all pictures: plain autograd stores, torch's contenders checkpoint
    "retrograde": style_of("reverse")[0],
    "plain": style_of("store")[0],
    "torch": style_of("checkpoint")[0],
    "peer": "#b0789c",
}
MARKERS = "osD^vP*X<>hpd8H"


def draw(results: Results, folder: Path, stem: str) -> dict[str, Path]:
    """Draw the pictures; they are returned by the part of the report that shows them."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return {}
    mpl.use("Agg")
    made: dict[str, Path] = {}

    def save(name: str, figure: Any) -> None:
        made[name] = folder / f"{stem}-{name}.png"
        figure.savefig(made[name], dpi=110)

    for name, comparison in results.comparisons.items():
        save(name, _scatter(comparison))
    if results.live:
        save("depth", _growth(results.live, "live tensors at the peak, in pairs of streams"))
    for allocator, growth in results.resident.items():
        if growth.peaks:
            label = f"resident memory of a step, in pairs of streams (allocator {allocator})"
            save(f"resident-{allocator.split()[0]}", _growth(growth, label))
    if results.gradients:
        save("gradients", _errors(results.gradients))
    return made


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour by family, marker within it, so that a contender looks the same in all pictures."""
    order = list(CONTENDERS)
    styles = {}
    for name in names:
        family = CONTENDERS[name].family
        place = [n for n in order if CONTENDERS[n].family == family].index(name)
        styles[name] = {"color": COLOURS[family], "marker": MARKERS[place % len(MARKERS)], "label": name}
        styles[name]["zorder"] = 3 if family == "retrograde" else 2
    return styles


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns + 4.2, 4.8), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, sharey=True)[0]


def _finish(figure: Any, axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    for ax in axes:
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter("{x:g}")
        ax.tick_params(axis="x", labelsize=8)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)


def _scatter(comparison: Comparison) -> Any:
    figure, axes = _figure()
    for name, style in _styles(list(comparison.seconds)).items():
        low, middle, high = comparison.to_baseline(CONTENDERS[name])
        spread = [[middle - low], [high - middle]]
        at = (comparison.in_pairs(name), middle)
        axes[0].errorbar([at[0]], [at[1]], yerr=spread, linestyle="none", capsize=2, **style)
        if name in _named(comparison):
            offset = (0, -24) if name == REVERSE else (6, -11)  # one below the other, as the points are close
            axes[0].annotate(name, at, offset, textcoords="offset points", fontsize=8, color=style["color"])
    axes[0].set(
        xscale="log",
        xlabel="peak, in pairs of streams",
        ylabel="time, ratio to plain autograd (momentum: to plain momentum)",
    )
    axes[0].set_title(f"{comparison.setting.name}: lower left is better", fontsize=10)
    _finish(figure, axes)
    return figure


def _named(comparison: Comparison) -> set[str]:
    """The contenders whose names are printed at their points: reverse, and the fastest peer that reverses."""
    peers = [c for c in rivals_in(comparison.seconds) if c.family == "peer"]
    return {REVERSE, *(c.name for c in sorted(peers, key=lambda c: comparison.to_baseline(c)[1])[:1])}


def _growth(growth: Growth, label: str) -> Any:
    figure, axes = _figure()
    for name, style in _styles(list(growth.peaks)).items():
        depths = sorted(growth.peaks[name])
        axes[0].plot(depths, [growth.peaks[name][d] / growth.pair_bytes for d in depths], markersize=4, **style)
    axes[0].set(xscale="log", yscale="log", xlabel="depth", ylabel=label)
    _finish(figure, axes)
    return figure


def _errors(gradients: GradientErrors) -> Any:
    figure, axes = _figure(len(gradients.errors))
    for ax, (precision, by_depth) in zip(axes, gradients.errors.items(), strict=True):
        names = dict.fromkeys(name for errors in by_depth.values() for name in errors)
        for name, style in _styles(list(names)).items():
            depths = [depth for depth in sorted(by_depth) if name in by_depth[depth]]
            ax.plot(depths, [by_depth[d][name] for d in depths], markersize=4, alpha=0.8, **style)
        ax.set(xscale="log", yscale="log", xlabel="depth", title=precision)
    axes[0].set_ylabel("relative error of the gradients")
    _finish(figure, axes)
    return figure
