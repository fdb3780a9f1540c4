"""The largest size that a job trains on paper: no trial runs, every step is simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrograde.memory import Mode
from retrograde.planning._fit import Fit, Trial, Vary, check_sizes, largest_of_modes

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
    limit = job.device.limit(memory_limit)

    def simulate(memory: str, size: int) -> tuple[bool, int]:
        with opened(target, job, **{vary: size}) as subject:
            rank = subject.rank()
            peak = rank.step([memory] * len(rank.stacks)).memory.peak
        return peak <= limit, peak

    results = largest_of_modes(modes, check_sizes(low, high, multiple_of), multiple_of, simulate, progress)
    name = target if isinstance(target, str) else getattr(target, "__name__", "the factory")
    return Fit(f"{name} on {job.ranks} x {job.device.name}, predicted,", vary, limit, results)
