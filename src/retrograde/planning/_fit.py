"""The largest size that trains under a memory limit: found by training, each time in a fresh process.

NOTE [What is measured]
 On an accelerator: the most bytes that its allocator had reserved, with the limit set in the allocator itself.
 On the CPU: the peak of the process's resident memory (VmHWM of Linux), with the interpreter, torch, the weights and
 the optimiser's state in it, as the kernel counts them against a container's limit. A process that passes the limit is
 ended at once. RLIMIT_AS and RLIMIT_DATA count addresses, not memory: 470 and 90 MiB more than was in use, in a
 process of 794 MiB. With glibc's default settings the peak of one and the same run varied from 569 to 610 MiB; where
 buffers of 1 MiB and more go back to the system at once (MALLOC_MMAP_THRESHOLD_), it was 470 or 471: trials set that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from retrograde._plan import Memory, check_memory

from ._sizes import parse_size, show_size
from ._trial import is_out_of_memory, peak_resident

Vary = Literal["batch", "length", "depth"]
Outcome = Literal["running", "fits", "too large"]

_POLL = 0.02
_TRIAL = "from retrograde.planning._trial import run; run()"
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # a setting of the user's own has precedence


class TrialError(RuntimeError):
    """A trial failed for another reason than memory, so that no size can be found."""


@dataclass(frozen=True)
class Trial:
    """One training run of one size. `peak` is None where it ran out of memory before a peak was seen."""

    memory: Memory
    size: int
    outcome: Outcome
    peak: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Largest:
    """The largest size that was seen to train in one memory mode, or None if the smallest did not.

    `is_bound` says that the search ended at its upper bound, so that a larger one may fit.
    """

    memory: Memory
    size: int | None
    peak: int | None
    is_bound: bool
    trials: tuple[Trial, ...] = field(repr=False)


@dataclass(frozen=True)
class Fit:
    """What `fit` found. `str()` of it is a table."""

    target: str
    vary: Vary
    memory_limit: int
    found: tuple[Largest, ...]

    def __getitem__(self, memory: Memory) -> Largest:
        """What was found for a memory mode."""
        return next(each for each in self.found if each.memory == memory)

    def __str__(self) -> str:
        rows = [("memory", f"largest {self.vary}", "peak", "trials", "seconds")]
        for each in self.found:
            size = "none" if each.size is None else f"{each.size}{' or more' if each.is_bound else ''}"
            peak = "" if each.peak is None else show_size(each.peak)
            rows.append((each.memory, size, peak, str(len(each.trials)), f"{sum(t.seconds for t in each.trials):.0f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        return "\n".join([f"{self.target} under {show_size(self.memory_limit)}", *lines])


def fit(
    target: str,
    *,
    memory_limit: int | str,
    vary: Vary = "batch",
    modes: Sequence[Memory] = ("store", "checkpoint", "reverse"),
    low: int = 1,
    high: int = 2**20,
    multiple_of: int = 1,
    timeout: float = 600.0,
    progress: Callable[[Trial], None] | None = None,
) -> Fit:
    """Find the largest batch, length or depth that trains under a memory limit, for each memory mode.

    Each trial is a fresh process that makes the model with `factory(batch=size)` (or `length=`, `depth=`) and
    trains it for two steps: sizes double until one does not fit, then the gap is halved. The answer was seen to fit,
    and the next size was seen not to.

    Args:
        target: `"module:factory"` or `"path/to/file.py:factory"`. The factory returns `(model, batch)`, `(model, batch,
            loss)` or `(model, batch, loss, optimizer)`; `batch` is what the model takes (a tensor, a tuple or a
            dictionary of arguments), `loss` takes what it returns. Without a loss its mean is used, without an
            optimiser AdamW.
        memory_limit: bytes, or a text such as "8GiB". See NOTE [What is measured].
        low: the smallest size to try; the search starts with it.
        high: the largest size to try.
        multiple_of: try multiples of this number only.
        timeout: the seconds that a trial may take.
        progress: is called with each trial as it starts and as it ends.
    """
    limit = parse_size(memory_limit)
    _check(target, limit, vary, modes)
    units = range(-(-low // multiple_of), high // multiple_of + 1)
    if low < 1 or multiple_of < 1 or not units:
        raise ValueError(
            f"low={low}, high={high}, multiple_of={multiple_of}: there is no size from 1 to try between these."
        )
    search = _Search(target, vary, limit, timeout, progress)
    found: list[Largest] = []
    start = units[0]
    for memory in modes:
        trials: list[Trial] = []

        def fits(unit: int, memory: Memory = memory, trials: list[Trial] = trials) -> bool:
            trials.append(search.trial(memory, unit * multiple_of))
            return trials[-1].outcome == "fits"

        best = largest(fits, units[0], units[-1], start)
        start = best or units[0]  # the next mode is likely to fit it too; it is measured all the same
        size = None if best is None else best * multiple_of
        peak = next((trial.peak for trial in trials if trial.size == size), None)
        found.append(Largest(memory, size, peak, best == units[-1], tuple(trials)))
    return Fit(target, vary, limit, tuple(found))


def largest(fits: Callable[[int], bool], low: int, high: int, start: int) -> int | None:
    """The largest number from `low` to `high` that fits, if all below it do: by doubling from `start`, then halving."""
    good, bad, size = low - 1, high + 1, start
    while bad - good > 1:
        if fits(size):
            good = size
        else:
            bad = size
        if bad > high:
            size = min(2 * good, high)
        elif good < low:
            size = max(bad // 2, low)
        else:
            size = (good + bad) // 2
    return good if good >= low else None


def _check(target: str, limit: int, vary: str, modes: Sequence[Memory]) -> None:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(
            f"target={target!r}: write it as 'module:factory' or 'path/to/file.py:factory', such as 'my_model.py:make'."
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"There is no file {place}.")
    if vary not in ("batch", "length", "depth"):
        raise ValueError(f"vary={vary!r} is not known; choose 'batch', 'length' or 'depth'.")
    for memory in modes:
        check_memory(memory)
    if not modes:
        raise ValueError("modes=() leaves nothing to try; give one of 'store', 'checkpoint', 'reverse', or several.")
    if torch.accelerator.is_available():
        return
    if not Path("/proc/self/status").exists():
        raise OSError("Without an accelerator, fit reads a process's peak memory from /proc, which this system lacks.")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limit > physical:
        raise ValueError(f"The limit is {show_size(limit)}, but this machine has {show_size(physical)}.")


@dataclass(frozen=True)
class _Search:
    """What the trials of one search have in common."""

    target: str
    vary: Vary
    limit: int
    timeout: float
    progress: Callable[[Trial], None] | None

    def trial(self, memory: Memory, size: int) -> Trial:
        """Run one trial, and tell of it when it starts and when it ends."""
        self._tell(Trial(memory, size, "running"))
        begun = time.monotonic()
        arguments = {"target": self.target, "vary": self.vary, "size": size, "memory": memory}
        try:
            fits, peak = _run({**arguments, "memory_limit": self.limit}, self.limit, self.timeout)
        except TrialError as error:
            raise TrialError(f"The trial of {self.vary}={size} with memory={memory!r} failed: {error}") from None
        trial = Trial(memory, size, "fits" if fits else "too large", peak, time.monotonic() - begun)
        self._tell(trial)
        return trial

    def _tell(self, trial: Trial) -> None:
        if self.progress is not None:
            self.progress(trial)


def _run(arguments: dict[str, Any], limit: int, timeout: float) -> tuple[bool, int | None]:
    """Start the process, end it where it passes the limit, and read its report: whether it fits, and its peak."""
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder, "report.json"), Path(folder, "errors.txt")
        command = [sys.executable, "-c", _TRIAL, json.dumps({**arguments, "report": str(report)})]
        environment = {**_ALLOCATOR, **os.environ, "PYTHONPATH": os.pathsep.join([e or os.getcwd() for e in sys.path])}
        with errors.open("wb") as stream:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stream)
            try:
                seen = _wait(process, limit, timeout)
            finally:
                process.kill()
                process.wait()
        if seen > limit:
            return False, seen
        if not report.exists():
            return _died(process.returncode, errors.read_text(errors="replace")), None
        told = json.loads(report.read_text(encoding="utf-8"))
    if told["outcome"] == "failed":
        raise TrialError(told["error"])
    if told["outcome"] == "out of memory":
        return False, None
    return told["peak"] <= limit, told["peak"]


def _wait(process: subprocess.Popen[bytes], limit: int, timeout: float) -> int:
    """Wait for the process; on the CPU, until its resident memory passes the limit. Returns the peak that was seen."""
    until, seen = time.monotonic() + timeout, 0
    status = None if torch.accelerator.is_available() else Path(f"/proc/{process.pid}/status")
    while process.poll() is None and seen <= limit:
        if time.monotonic() > until:
            raise TrialError(
                f"it took longer than {timeout:.0f} s. Give it more time, or a smaller upper bound (high)."
            )
        if status is not None:
            try:
                seen = peak_resident(status)
            except OSError:  # it has just ended
                break
        time.sleep(_POLL)
    return seen


def _died(returncode: int, errors: str) -> bool:
    """A process that ended without a report: False if for want of memory, else an error."""
    if -returncode == signal.SIGKILL or is_out_of_memory(RuntimeError(errors)):
        return False
    cause = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "it wrote nothing")
    raise TrialError(f"its process ended with {cause}: {last}")
