"""The figures of README.md, docs/faq.md and docs/benchmarks.md, from the newest reports in benchmarks/results/.

    python benchmarks/documents.py    # rewrites the README's table, links of reports, and figures in sentences

Run it after `make bench` or benchmarks/features.py; tests/repository/test_docs.py checks that nothing is out of date.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Report = dict[str, Any]

BUDGET = "torch.compile, activation budget 0.0"
ROWS = {  # the first cell of a row: the name in the report of benchmarks/run.py, and in that of features.py
    "plain autograd": ("plain", None),
    "torch's and Hugging Face's checkpointing": ("checkpoint, non-reentrant",) * 2,
    "`torch.compile`, activation budget 0": ("compiled, budget 0.0", BUDGET),
    "RevTorch": ("RevTorch",) * 2,
    "MemCNN": ("MemCNN",) * 2,
    "RevLib": ("RevLib",) * 2,
    '**retrograde, `"reverse"`**': ("retrograde reverse",) * 2,
    "**retrograde, exact**": ("retrograde exact",) * 2,
}
DEPTHS = ("6", "48", "192")
TIMES = {"time, width 512": "large", "64": "tiny"}
FEATURES = {  # the column of the README, and how that of the report begins
    "dropout": "dropout",
    "batch norm updated": "batch norm",
    "double backward": "double backward",
    "exact": "float32 gradients",
    "compile": "`torch.compile`",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
}


def newest(kind: str) -> Path:
    """The newest report of a kind: "bench" or "features"."""
    return max(RESULTS.glob(f"*-{kind}.md"))


def newest_figures() -> Report:
    figures: Report = json.loads(newest("bench").with_suffix(".json").read_text(encoding="utf-8"))
    return figures


def time_in(report: Report, setting: str, contender: str) -> str:
    """The median of the ratios to plain autograd, round by round, as documents write it."""
    seconds = report["comparisons"][setting]["seconds"]
    return f"{statistics.median(a / b for a, b in zip(seconds[contender], seconds['plain'], strict=True)):.2f}"


def peak_in(report: Report, setting: str, contender: str) -> str:
    """The peak in pairs of streams, as documents write it."""
    comparison = report["comparisons"][setting]
    return f"{comparison['peaks'][contender] / comparison['pair_bytes']:.1f}".removesuffix(".0")


def live_in(report: Report, depth: str, contender: str) -> str:
    """The peak of activations at a depth, in pairs of streams."""
    return f"{report['live']['peaks'][contender][depth] / report['live']['pair_bytes']:.1f}"


Claim = tuple[str, Callable[[Report, str, str], str], str, str]
"""Words around a figure, what it is a figure of, in which comparison or at which depth, of whom."""

README_CLAIMS: list[Claim] = [
    (r'in the peak, where `"reverse"` has ([\d.]+)', peak_in, "compiled", "retrograde reverse"),
]
FAQ_CLAIMS: list[Claim] = [
    (r"plain autograd peaks at ([\d.]+) pairs of streams", peak_in, "large", "plain"),
    (r"pairs of streams, torch's checkpoint at ([\d.]+) and", peak_in, "large", "checkpoint, non-reentrant"),
    (r"torch's checkpoint at [\d.]+ and `\"reverse\"` at ([\d.]+)", peak_in, "large", "retrograde reverse"),
    (r"In time, torch's checkpoint takes ([\d.]+) of plain", time_in, "large", "checkpoint, non-reentrant"),
    (r"of plain autograd and `\"reverse\"` ([\d.]+)", time_in, "large", "retrograde reverse"),
    (r"At 48 blocks of width 64 the peaks are ([\d.]+)", live_in, "48", "plain"),
    (r"the peaks are [\d.]+, ([\d.]+) and", live_in, "48", "checkpoint, non-reentrant"),
    (r"the peaks are [\d.]+, [\d.]+ and ([\d.]+)", live_in, "48", "retrograde reverse"),
    (r"bench.md\) at ([\d.]+) pairs of streams", live_in, "6", "checkpoint, non-reentrant"),
    (r"pairs of streams and `\"reverse\"` at ([\d.]+)", live_in, "6", "retrograde reverse"),
]
CLAIMS: list[Claim] = [  # of docs/benchmarks.md
    (r'`"reverse"` takes ([\d.]+) of plain autograd\'s time', time_in, "large", "retrograde reverse"),
    (r"needs ([\d.]+) pairs of streams where plain autograd", peak_in, "large", "retrograde reverse"),
    (r"torch's checkpoint takes ([\d.]+) and", time_in, "large", "checkpoint, non-reentrant"),
    (r"RevTorch ([\d.]+) and", time_in, "large", "RevTorch"),
    (r"tiny blocks \(width 64\) it takes ([\d.]+),", time_in, "tiny", "retrograde reverse"),
    (r"torch's checkpoint ([\d.]+), and RevTorch", time_in, "tiny", "checkpoint, non-reentrant"),
    (r", and RevTorch ([\d.]+): RevTorch is", time_in, "tiny", "RevTorch"),
    (r"overhead, it takes ([\d.]+) and", time_in, "multiply", "retrograde reverse"),
    (r"and RevTorch ([\d.]+), whose peak", time_in, "multiply", "RevTorch"),
    (r"exact stack takes ([\d.]+) on tiny blocks", time_in, "tiny", "retrograde exact"),
    (r"and ([\d.]+) on branches that only multiply", time_in, "multiply", "retrograde exact"),
    (r"tiny blocks take ([\d.]+) of plain eager time", time_in, "compiled", "retrograde, compiled"),
    (r"where RevTorch takes ([\d.]+)", time_in, "compiled", "RevTorch"),
]


def table_in(text: str) -> dict[str, dict[str, str]]:
    """The first table of a page, by row and column."""
    lines = [re.split(r"\s*\|\s*", line)[1:-1] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    columns, _, *rows = lines
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


def figures(report: Report, contender: str) -> list[str]:
    """Memory by depth, and times by width. What torch compiles as a whole was run at depth 6 and width 64 alone."""
    if contender not in report["live"]["peaks"]:
        peak, time = (of(report, "compiled", contender) for of in (peak_in, time_in))
        return [f"{peak}*", "–", "–", "–", f"{time}*"]
    times = [time_in(report, setting, contender) for setting in TIMES.values()]
    return [*(live_in(report, depth, contender) for depth in DEPTHS), *times]


def features(report: dict[str, dict[str, str]], name: str | None) -> list[str]:
    """What a library gets right, in a word or two."""
    if name is None:
        return [in_words("yes", column) for column in FEATURES]  # the reference of all these tests
    cells = []
    for column, start in FEATURES.items():
        title = next(title for title in report[name] if title.startswith(start))
        cells.append(in_words(report[name][title], column))
    return cells


def in_words(cell: str, column: str) -> str:
    if column == "batch norm updated":
        return {"yes": "once", "updated 2 times": "twice"}.get(cell, cell.removeprefix("updated "))
    if cell.startswith("off by"):
        return "no" if column == "exact" else "wrong"
    return "error" if cell.startswith("error") else cell


def readme_table() -> str:
    report = newest_figures()
    seen = table_in(newest("features").read_text(encoding="utf-8"))
    head = ["", f"memory, depth {DEPTHS[0]}", *DEPTHS[1:], *TIMES, *FEATURES]
    lines = [head, ["---"] * len(head)]
    lines += [[row, *figures(report, a), *features(seen, b)] for row, (a, b) in ROWS.items()]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def with_table(readme: str) -> str:
    return re.sub(r"(?<=\n)\|.*\|(?:\n\|.*\|)*", lambda _: readme_table(), readme, count=1)


def with_reports(page: str) -> str:
    """A page that names and links the newest reports."""
    for kind in ("bench", "features"):
        page = re.sub(rf"[\d-]+-{kind}\.md", newest(kind).name, page)
    return re.sub(r"\[report of [\d-]+\]", f"[report of {newest('bench').stem.removesuffix('-bench')}]", page)


def with_figures(page: str, claims: list[Claim]) -> str:
    report = newest_figures()
    for words, figure, setting, contender in claims:
        found = list(re.finditer(words, page))
        if len(found) != 1:
            raise ValueError(f"{len(found)} places match {words!r}; one is needed.")
        start, end = found[0].start(1), found[0].start(1) + len(found[0][1].rstrip("."))
        page = page[:start] + figure(report, setting, contender) + page[end:]
    return page


DOCUMENTS: dict[Path, Callable[[str], str]] = {
    ROOT / "README.md": lambda page: with_figures(with_reports(with_table(page)), README_CLAIMS),
    ROOT / "docs" / "faq.md": lambda page: with_figures(with_reports(page), FAQ_CLAIMS),
    ROOT / "docs" / "benchmarks.md": lambda page: with_figures(page, CLAIMS),
}


def main() -> None:
    for path, rewrite in DOCUMENTS.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(rewrite(text), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'rewritten' if rewrite(text) != text else 'unchanged'}")


if __name__ == "__main__":
    main()
