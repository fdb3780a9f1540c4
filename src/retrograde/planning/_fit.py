"""The largest size that trains under a memory limit: found by training, each time in a new process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from retrograde.measure.formatting import align, format_bytes, parse_size
from retrograde.measure.targets import split_target
from retrograde.memory import Mode, mode_named
from retrograde.network.choices import check_choice

from ._trial_process import TrialError, run_trial

if TYPE_CHECKING:
    from .on_paper import Device

Vary = Literal["batch", "length", "depth"]
Outcome = Literal["running", "fits", "too large"]

DEFAULT_MODES = ("store", "checkpoint", "reverse")


@dataclass(frozen=True)
class Trial:
    """One training run of one size. `peak` is None where it ran out of memory before a peak was seen."""

    memory: str
    size: int
    outcome: Outcome
    peak: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Largest:
    """The largest size that trained in one memory mode, or None if the smallest did not.

    `is_bound` says that the search ended at its upper bound, so that a larger one may fit.
    """

    memory: str
    size: int | None
    peak: int | None
    is_bound: bool
    trials: tuple[Trial, ...] = field(repr=False)


@dataclass(frozen=True)
class Fit:
    """The result of `fit`: the largest size for each memory mode. `str()` of it is a table."""

    target: str
    vary: Vary
    memory_limit: int
    largest: tuple[Largest, ...]

    def __getitem__(self, memory: Mode) -> Largest:
        """The result for a memory mode."""
        return next(each for each in self.largest if each.memory == str(memory))

    def __str__(self) -> str:
        rows = [("memory", f"largest {self.vary}", "peak", "trials", "seconds")]
        for each in self.largest:
            size = "none" if each.size is None else f"{each.size}{' or more' if each.is_bound else ''}"
            peak = "" if each.peak is None else format_bytes(each.peak)
            rows.append((each.memory, size, peak, str(len(each.trials)), f"{sum(t.seconds for t in each.trials):.0f}"))
        return "\n".join([f"{self.target} under {format_bytes(self.memory_limit)}", *align(rows)])


def fit(
    target: str | Callable[..., Any],
    *,
    memory_limit: int | str | None = None,
    vary: Vary = "batch",
    modes: Sequence[Mode] = DEFAULT_MODES,
    low: int = 1,
    high: int = 2**20,
    multiple_of: int = 1,
    timeout: float = 600.0,
    progress: Callable[[Trial], None] | None = None,
    on: str | Device | None = None,
    **job: Any,
) -> Fit:
    """Find the largest batch, length or depth that trains under a memory limit, for each memory mode.

    Each trial is a new process that makes the model with `factory(batch=size)` (or `length=`, `depth=`) and trains it
    for two steps: sizes double until one does not fit, then the gap is halved. The size in the result has trained, and
    the next larger one has not.

    Args:
        target: `"module:factory"` or `"path/to/file.py:factory"`. The factory returns `(model, batch)`, `(model, batch,
            loss)` or `(model, batch, loss, optimizer)`; `batch` is what the model takes (a tensor, a tuple or a
            dictionary of arguments), `loss` takes what it returns. By default the loss is
            `retrograde.measure.default_loss`, and the optimiser AdamW.
        memory_limit: bytes, or a text such as "8GiB". See NOTE [What is measured].
        modes: the memory modes to try. Blocks without an inverse get a mode's fallback.
        low: the smallest size to try; the search starts with it.
        high: the largest size to try.
        multiple_of: try multiples of this number only.
        timeout: the seconds that a trial may take.
        progress: called with each trial when it starts and when it ends.
        on: a device to find the sizes for, as in `plan`: every step is simulated, nothing is allocated, the target may
            be the factory itself, and the limit is the device's memory unless another is given.
        job: with `on`: `ranks`, `shard`, `optimizer`, `fused` and `precision`, as in `plan`.
    """
    if on is not None:
        from .on_paper.fit import fit_on

        _check_choices(vary, modes)
        sizes: dict[str, Any] = {"low": low, "high": high, "multiple_of": multiple_of, "vary": vary, "modes": modes}
        return fit_on(on, target, memory_limit=memory_limit, progress=progress, **sizes, **job)
    if job or memory_limit is None or not isinstance(target, str):
        raise TypeError("fit: without on=..., give a target by its name and a memory_limit, and nothing of a job.")
    limit = parse_size(memory_limit)
    _check(target, limit, vary, modes)
    if not timeout > 0:
        raise ValueError(f"timeout={timeout}: give the seconds that a trial may take, more than 0.")
    units = check_sizes(low, high, multiple_of)
    arguments = {"target": target, "vary": vary, "memory_limit": limit}

    def run(memory: str, size: int) -> tuple[bool, int | None]:
        try:
            return run_trial({**arguments, "memory": memory, "size": size}, timeout)
        except TrialError as error:
            raise TrialError(f"The trial of {vary}={size} with memory={memory!r} failed: {error}") from None

    return Fit(target, vary, limit, largest_of_modes(modes, units, multiple_of, run, progress))


def largest_of_modes(
    modes: Sequence[Mode],
    units: range,
    multiple_of: int,
    run: Callable[[str, int], tuple[bool, int | None]],
    progress: Callable[[Trial], None] | None,
) -> tuple[Largest, ...]:
    """The largest size for each mode, with its trials.

    Args:
        units: the sizes to try, in units of `multiple_of`.
        run: one trial of a mode and a size: whether it fits, and its peak if that is known.
    """
    report = progress or (lambda trial: None)
    results: list[Largest] = []
    start = units[0]
    for memory in map(str, modes):
        trials: dict[int, Trial] = {}

        def fits(unit: int, memory: str = memory, trials: dict[int, Trial] = trials) -> bool:
            size, begun = unit * multiple_of, time.monotonic()
            report(Trial(memory, size, "running"))
            fits, peak = run(memory, size)
            trials[unit] = Trial(memory, size, "fits" if fits else "too large", peak, time.monotonic() - begun)
            report(trials[unit])
            return fits

        best = largest(fits, units[0], units[-1], start)
        start = best or units[0]  # the next mode is likely to fit it too; it is tried all the same
        size, peak = (None, None) if best is None else (trials[best].size, trials[best].peak)
        results.append(Largest(memory, size, peak, best == units[-1], tuple(trials.values())))
    return tuple(results)


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


def check_sizes(low: int, high: int, multiple_of: int) -> range:
    """The sizes to try, in units of `multiple_of`."""
    units = range(-(-low // multiple_of), high // multiple_of + 1) if multiple_of > 0 else range(0)
    if low < 1 or not units:
        raise ValueError(
            f"low={low}, high={high}, multiple_of={multiple_of}: there is no size from 1 to try between these."
        )
    return units


def _check_choices(vary: str, modes: Sequence[Mode]) -> None:
    check_choice("vary", vary, get_args(Vary))
    for memory in modes:
        mode_named(str(memory))  # by its name, which is what a new process can be told
    if not modes:
        raise ValueError(f"modes={modes!r} leaves nothing to try; give one memory mode or several.")


def _check(target: str, limit: int, vary: str, modes: Sequence[Mode]) -> None:
    split_target(target)
    _check_choices(vary, modes)
    if torch.accelerator.is_available():
        return
    if not Path("/proc/self/status").exists():
        raise OSError("Without an accelerator, fit needs a process's peak memory from /proc, which is not there.")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limit > physical:
        raise ValueError(f"The limit is {format_bytes(limit)}, but this machine has {format_bytes(physical)}.")
