"""The machine and the software of a report, and its progress."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _field(path: str, name: str) -> str:
    return next((line.split(":", 1)[1].strip() for line in _lines(path) if line.startswith(name)), "unknown")


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def commit() -> str:
    """The commit, and whether the library's own files differ from it."""
    head = _git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{head}, with uncommitted changes" if _git("status", "--porcelain", "src", "benchmarks/harness") else head


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def load() -> float:
    """The load average of the last minute: before the first measurement, that of other work on this machine."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def describe(load_before: float, packages: Iterable[str]) -> list[str]:
    memory = _field("/proc/meminfo", "MemTotal")
    gib = f"{int(memory.split()[0]) / 2**20:.0f} GiB" if memory != "unknown" else memory
    busy = "; other work ran at the same time, so trust ratios rather than milliseconds" if load_before > 0.5 else ""
    return [
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- hardware: {_field('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores, {gib}; "
        f"load average before the first measurement {load_before:.2f}{busy}",
        f"- software: torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release().split('-')[0]}, ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', 'unset')}",
        "- peers: " + ", ".join(f"{package} {version(package)}" for package in packages),
    ]


class Progress:
    """Lines on the standard error: overwritten on a terminal; elsewhere only those that end a part."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def minutes(self) -> float:
        return (time.perf_counter() - self.start) / 60

    def step(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K[{self.minutes:4.1f} min] {text}", end="", file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        self.step("")
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}[{self.minutes:4.1f} min] {text}", file=sys.stderr, flush=True)
