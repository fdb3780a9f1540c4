"""The report: tables of the measurements, and where retrograde is not first."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from .contenders import PAIR, REVERSE
from .field import TOLERANCE
from .gradients import MEANING
from .results import Comparison, Growth, Results
from .verdict import CAUSES, CONTENDERS, findings, limit

METHOD = """\
- Every contender runs the same branches with the same weights: `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`, both streams \
start as x, their mean is the output. momentumnet has an arithmetic of its own, `v = 0.9 v + 0.1 f(x)`, `x += v` over \
the same branches, and so has its own baseline, "plain momentum"; "retrograde momentum" computes the same.
- Time is that of forward and backward. Contenders run interleaved in one process, each once per round in shuffled \
order; the ratio to the baseline is computed per round, and its median and quartiles are given. Garbage is \
collected between the runs, not in them.
- Memory is the peak of the bytes of live tensors, without parameters and without accumulated gradients, in units of \
S, the bytes of one pair of streams. A library that returns all gradients at the end (momentumnet) holds them until \
then, and they count.
- FLOPs are those of matrix products, convolutions and attention, relative to the baseline's.
- "gradients" is the relative error of output and gradients, as one vector, against the baseline's in float32; \
rounding gives about 1e-7."""


RESIDENT = "What a step adds to the resident memory of a fresh process, without the gradients (in S)."
ALLOCATORS = {
    "default": "The default allocator: freed memory stays with the process, fragmented.",
    "tight": "MALLOC_MMAP_THRESHOLD_=65536: larger buffers are returned to the system when they are freed.",
}


def render(results: Results, pictures: dict[str, Path]) -> str:
    title = f"# Benchmarks, {datetime.date.today()}"
    lines = [title, "", *results.machine, f"- the whole run took {results.minutes:.1f} minutes"]
    if results.quick:
        lines += ["", "**A quick run at toy sizes, to check that everything works. Its figures mean nothing.**"]
    lines += ["", "## How it was measured", "", METHOD, ""]
    lines += ["## Where retrograde is not first", "", *_not_first(results)]
    for name, comparison in results.comparisons.items():
        lines += ["", f"## {name}", "", *_comparison(comparison), *_picture(pictures, name)]
    if results.live:
        head = "Live bytes of tensors at the peak (in S), and the slope of the line through them."
        lines += ["", "## Live memory by depth", "", *_growth(results.live, head), *_picture(pictures, "depth")]
    for allocator, growth in results.resident.items():
        head = f"{RESIDENT} {ALLOCATORS[allocator]}"
        lines += ["", f"## Resident memory by depth, allocator {allocator}", "", *_growth(growth, head)]
        lines += _picture(pictures, f"resident-{allocator.split()[0]}")
    if results.gradients:
        lines += ["", "## Gradient error", "", *_gradients(results), *_picture(pictures, "gradients")]
    lines += ["", "## Who did not run", "", *_absent(results)]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _picture(pictures: dict[str, Path], name: str) -> list[str]:
    return ["", f"![{name}]({pictures[name].name})"] if name in pictures else []


def _named(name: str) -> str:
    note = CONTENDERS[name].note
    shown = f"**{name}**" if CONTENDERS[name].family == "retrograde" else name
    return f"{shown} ({note})" if note else shown


def _not_first(results: Results) -> list[str]:
    all_findings = findings(results)
    if not all_findings:
        return ["It is first in all measurements of this report."]
    lines = []
    for part, group in groupby(all_findings, key=lambda finding: finding.part):
        lines += ["", f"### {part}", "", *(f"- {finding.text}" for finding in group)]
        lines += ["", f"Why: {CAUSES.get(part, 'not known yet.')}"]
    return lines[1:]


def _comparison(comparison: Comparison) -> list[str]:
    setting = comparison.setting
    lines = [f"{setting.describe()}. S is {comparison.pair_bytes / 2**10:.1f} KiB."]
    if comparison.measured_by == "profiler":
        lines[0] += " Memory is recorded by the allocator here, gradients included: no tracker sees compiled code."
    if setting.name == "large":
        lines += ["", _limit_line(comparison)]
    head = ["contender", "time", "quartiles", "ms", "peak, S", "FLOPs", "gradients"]
    if setting.kind == "multiply":
        head += ["µs per block", "above a pair"]
    return [*lines, "", *table(head, (_row(comparison, name) for name in comparison.seconds))]


def _row(comparison: Comparison, name: str) -> list[str]:
    contender = CONTENDERS[name]
    low, middle, high = comparison.to_baseline(contender)
    milliseconds = 1e3 * statistics.median(comparison.seconds[name])
    off = comparison.distances[name]
    row = [
        _named(name),
        f"{middle:.3f}",
        f"{low:.3f} – {high:.3f}",
        f"{milliseconds:.2f}",
        f"{comparison.in_pairs(name):.2f}",
        _flops(comparison, name),
        f"{off:.1e}" if off <= TOLERANCE else f"**{off:.1e}**",
    ]
    if comparison.setting.kind == "multiply":
        row += [f"{1e3 * milliseconds / comparison.setting.depth:.1f}", f"{1e6 * comparison.above_pair(name):+.1f}"]
    return row


def _flops(comparison: Comparison, name: str) -> str:
    plain = comparison.flops.get("plain", 0)
    return f"{comparison.flops[name] / plain:.3f}" if plain and comparison.flops.get(name) else "–"


def _limit_line(comparison: Comparison) -> str:
    bound = limit(comparison.setting.depth)
    if not {REVERSE, PAIR} <= set(comparison.seconds):
        return f"The limit (4D−1)/3D is {bound:.3f}."
    ratios = [comparison.ratio(REVERSE, baseline)[1] for baseline in ("plain", PAIR)]
    return (
        f"The limit of reversing, (4D−1)/3D, is {bound:.3f}; {REVERSE} takes {ratios[0]:.3f} of plain "
        f"({ratios[0] / bound - 1:+.1%}) and {ratios[1]:.3f} of plain on a pair ({ratios[1] / bound - 1:+.1%})."
    )


def _growth(growth: Growth, head: str) -> list[str]:
    setting, unit = growth.setting, growth.pair_bytes
    size = f"batch {setting.batch}, length {setting.length}, width {setting.width}"
    lines = [f"{head} {size}: S is {unit / 2**10:.0f} KiB.", ""]
    depths = sorted({depth for points in growth.peaks.values() for depth in points})
    rows = []
    for name, points in growth.peaks.items():
        cells = [f"{points[depth] / unit:.1f}" if depth in points else "–" for depth in depths]
        slope = growth.slope(name) if len(points) > 1 else float("nan")
        rows.append([_named(name), *cells, f"{slope / unit:.3f}", f"{slope / 2**10:.1f}"])
    return lines + table(["contender", *(f"depth {d}" for d in depths), "S per block", "KiB per block"], rows)


def _gradients(results: Results) -> list[str]:
    assert results.gradients is not None
    lines = [
        "Against float64 autograd with the same weights, relative, all gradients as one vector. "
        + "; ".join(f"{precision}: {meaning}" for precision, meaning in MEANING.items())
        + ". "
        + "; ".join(f"depth {depth}: {size}" for depth, size in results.gradients.sizes.items())
        + "."
    ]
    columns = [(p, depth) for p, by_depth in results.gradients.errors.items() for depth in by_depth]
    names = dict.fromkeys(n for p, d in columns for n in results.gradients.errors[p][d])
    rows = [
        [_named(name), *(_error(results.gradients.errors[p][depth].get(name)) for p, depth in columns)]
        for name in names
    ]
    return [*lines, "", *table(["contender", *(f"{p}, {depth}" for p, depth in columns)], rows)]


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _absent(results: Results) -> list[str]:
    parts = {name: c.absent for name, c in results.comparisons.items()}
    parts["live memory"] = results.live.absent if results.live else {}
    parts |= {f"resident memory, {allocator}": growth.absent for allocator, growth in results.resident.items()}
    parts["gradients"] = results.gradients.absent if results.gradients else {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for part_name, absent in parts.items():
        for who, why in absent.items():
            reasons.setdefault((who, why), []).append(part_name)
    if not reasons:
        return ["All contenders ran in all parts."]
    rows = [[who, ", ".join(where), why.replace("|", "\\|")] for (who, why), where in reasons.items()]
    return table(["contender", "where", "reason"], rows)
