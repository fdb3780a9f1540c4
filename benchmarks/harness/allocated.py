"""The bytes that a process has allocated, from its first tensor on, as the allocator itself tells."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_MARK = "the step that counts"


@contextmanager
def without_stderr() -> Iterator[None]:
    """Silence the standard error of the process, to which the profiler prints."""
    sys.stderr.flush()
    original, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(nowhere)


def allocated_peak(prepare: Callable[[], Callable[[], None]], *, warm_up: int = 2) -> int:
    """The most bytes alive during a training step: everything that was allocated since `prepare` began counts.

    Args:
        prepare: makes a model and all that trains it, and returns the step.
        warm_up: how many steps to take before the one that counts.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with without_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step = prepare()
        for _ in range(warm_up):
            step()
        gc.collect()  # wrappers leave the parameters that they replaced in cycles
        with torch.profiler.record_function(_MARK):
            step()
    events = profile.profiler.kineto_results.events()
    begun = next(e.start_ns() for e in events if e.name() == _MARK)
    live = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= begun:
            most = max(most, live)
    return most
