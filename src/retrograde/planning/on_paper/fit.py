"""The largest size that a job trains on paper: no trial runs, every step is simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from retrograde.measure.formatting import parse_size
from retrograde.memory import Mode
from retrograde.planning._fit import Fit, Largest, Trial, Vary, check_sizes, largest

from .devices import Device, device_named
from .jobs import Job
from .planner import opened


def fit_on(
    on: str | Device,
    target: str | Callable[..., Any],
    *,
    memory_limit: int | str | None,
    vary: Vary,
    modes: Sequence[Mode],
    low: int,
    high: int,
    multiple_of: int,
    progress: Callable[[Trial], None] | None = None,
    **options: Any,
) -> Fit:
    """What `retrograde.planning.fit` does with `on`: its arguments, and those of a `Job`."""
    shard = options.pop("shard", None) or "none"
    job = Job(device_named(on), shard=shard, **options)
    limit = job.device.memory if memory_limit is None else parse_size(memory_limit)
    units = check_sizes(low, high, multiple_of)
    report = progress or (lambda trial: None)
    results: list[Largest] = []
    start = units[0]
    for memory in map(str, modes):
        trials: list[Trial] = []

        def fits(unit: int, memory: str = memory, trials: list[Trial] = trials) -> bool:
            size, begun = unit * multiple_of, time.monotonic()
            report(Trial(memory, size, "running"))
            with opened(target, job, **{vary: size}) as subject:
                rank = subject.rank()
                peak = rank.step([memory] * len(rank.stacks)).memory.peak
            trials.append(Trial(memory, size, "fits" if peak <= limit else "too large", peak, time.monotonic() - begun))
            report(trials[-1])
            return peak <= limit

        best = largest(fits, units[0], units[-1], start)
        start = best or units[0]
        size = None if best is None else best * multiple_of
        peak = next((trial.peak for trial in trials if trial.size == size), None)
        results.append(Largest(memory, size, peak, best == units[-1], tuple(trials)))
    name = target if isinstance(target, str) else getattr(target, "__name__", "the factory")
    where = f"{name} on {job.ranks} x {job.device.name}, predicted,"
    return Fit(where, vary, limit, tuple(results))
