"""What all reproductions share: options, progress, and a dated page with tables and pictures."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import retrograde

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).resolve().parent
# Before the first bfloat16 product: those of oneDNN die with SIGILL on some machines. See the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@dataclass(frozen=True)
class Options:
    """`quick` makes everything small enough for a test; the figures then mean nothing."""

    quick: bool
    results: Path
    times_only: bool = False


def read_options(description: str | None, *, may_time_again: bool = False) -> Options:
    """The options of the command line. Everything runs on one thread: times are steadier, and results bit-identical."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="run for seconds instead of minutes, to check that it works"
    )
    parser.add_argument("--results", type=Path, help="the folder to write to", default=FOLDER / "results")
    if may_time_again:
        parser.add_argument(
            "--times-only",
            action="store_true",
            help="measure the times again, and take all other results from the last run",
        )
    given = parser.parse_args()
    torch.set_num_threads(1)
    return Options(given.quick, given.results, may_time_again and given.times_only)


class Progress:
    """Lines on the standard error: overwritten on a terminal; elsewhere one in ten."""

    def __init__(self, label: str, steps: int) -> None:
        self.label, self.steps, self.done = label, steps, 0
        self.start = time.perf_counter()

    def step(self, what: str) -> None:
        self.done += 1
        seconds = time.perf_counter() - self.start
        left = seconds / self.done * (self.steps - self.done)
        line = f"{self.label} {self.done}/{self.steps}, {seconds:.0f} s, {left:.0f} s left: {what}"
        last = self.done == self.steps
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{line}" + "\n" * last)
        elif last or self.done % max(1, self.steps // 10) == 0:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard deviation of a sample."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Kept:
    """Finished results in a file beside the page, one JSON line each: a run that was stopped continues after them.

    Args:
        name: the name of the script.
        settings: what the results depend on; lines of other settings are ignored.
    """

    def __init__(self, name: str, options: Options, settings: object) -> None:
        self.path = None if options.quick else options.results / f"{name}.jsonl"
        self.settings = str(settings)
        self.found: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines() if self.path and self.path.exists() else []:
            result = json.loads(line)
            if result["settings"] == self.settings and not (options.times_only and result["key"].startswith("time")):
                self.found[result["key"]] = result

    def __call__(self, key: str, make: Callable[[], Any]) -> Any:
        """The result with this key: a kept one, or a new one. Keys of times start with "time"."""
        if key not in self.found:
            self.found[key] = {
                "key": key, "value": make(), "date": str(datetime.date.today()), "commit": _commit(),
                "settings": self.settings,
            }  # fmt: skip
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(self.found[key]) + "\n")
        return self.found[key]["value"]

    def origin(self) -> str:
        """When the results were made, and from which commits."""
        dates, commits = (dict.fromkeys(result[part] for result in self.found.values()) for part in ("date", "commit"))
        return f"{', '.join(dates)}, commit: {', '.join(commits)}"


class Page:
    """The page of one reproduction: the question, the results, the machine and the method.

    Args:
        name: the name of the script, of the page and of its picture.
        title: the title of the page.
        kept: the results that it is made of, if they are kept.
    """

    def __init__(self, name: str, title: str, options: Options, kept: Kept | None = None) -> None:
        self.name, self.title, self.options, self.kept = name, title, options, kept
        self.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self.start = time.perf_counter()
        self.parts: list[str] = []

    def add(self, *parts: str) -> None:
        """Paragraphs and tables."""
        self.parts += parts

    def draw(self, draw: Callable[[Sequence[Axes]], None], *, panels: int = 1) -> None:
        """A picture under the page's name, where matplotlib is installed."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            sys.stderr.write("No picture, because matplotlib is not installed: pip install matplotlib\n")
            return
        figure = Figure(figsize=(5.5 * panels, 4), layout="constrained")
        draw(list(figure.subplots(1, panels, squeeze=False)[0]))
        self.options.results.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.options.results / f"{self.name}.png", dpi=130)
        self.add(f"![{self.title}]({self.name}.png)")

    def write(self) -> None:
        """Write the page, and print it."""
        head = [f"# {self.title}", f"`python reproductions/{self.name}.py`"]
        if self.options.quick:
            head.append("**A quick run at toy sizes, to check that everything works. Its figures mean nothing.**")
        text = "\n\n".join([*head, *self.parts, "## The machine", self._machine()]) + "\n"
        self.options.results.mkdir(parents=True, exist_ok=True)
        path = self.options.results / f"{self.name}.md"
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(text)
        sys.stderr.write(f"Written to {os.path.relpath(path)}\n")

    def _machine(self) -> str:
        busy = "; other work ran at the same time, so trust ratios rather than seconds" if self.load > 0.5 else ""
        minutes = (time.perf_counter() - self.start) / 60
        origin = f"{datetime.date.today()}, commit: {_commit()}" if self.kept is None else self.kept.origin()
        return "\n".join(
            [
                f"- date: {origin}",
                f"- hardware: {_processor()}, {os.cpu_count()} cores; load average before the run {self.load:.1f}"
                f"{busy}",
                f"- software: retrograde {retrograde.__version__}, torch {torch.__version__}, Python "
                f"{platform.python_version()}, {platform.system()}, "
                f"ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', 'unset')}; one thread per process",
                f"- the {'whole' if self.kept is None else 'last'} run took {minutes:.1f} minutes",
            ]
        )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


@functools.cache
def _commit() -> str:
    head = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--", "../src", "*.py")
    return f"{head}, with uncommitted changes" if changed else head


def run(main: Callable[[], None]) -> None:
    """Run a reproduction to its end, or until Ctrl-C."""
    try:
        main()
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped; no page was written.\n")
        sys.exit(130)  # as a shell reports an interrupt
