"""The bytes that a process has allocated, from its first tensor on, as the allocator itself tells."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    begun, changes = _changes(profile.profiler.kineto_results.experimental_event_tree())
    live = most = 0
    for time, change in changes:
        live += change
        if time >= begun:
            most = max(most, live)
    return most


def _changes(tree: list[Any]) -> tuple[int, list[tuple[int, int]]]:
    """When the step that counts began; and all changes of the allocated bytes, with their times.

    What was allocated before the profiler began, and is freed now, does not count.
    """
    events = sorted(_walk(tree), key=lambda event: int(event.start_time_ns))
    begun = next(event.start_time_ns for event in events if event.name == _MARK)
    known: set[int] = set()
    changes = []
    for event in events:
        if event.name != "[memory]":
            continue
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0 or address in known:
            (known.add if size > 0 else known.remove)(address)
            changes.append((event.start_time_ns, size))
    return begun, changes


def _walk(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


# Several processes: collectives free memory on threads that the profiler does not follow


def counting_allocations(folder: Path) -> dict[str, str]:
    """The environment of a process in which `peaks_of_steps` can be called. Needs a C compiler."""
    library = folder / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def peaks_of_steps(prepare: Callable[[], Callable[[], None]], steps: int, *, warm_up: int = 2) -> list[int]:
    """As `allocated_peak`, of each of several steps, and whichever thread frees the memory."""
    counted = ctypes.CDLL(None)
    for name in ("allocations_live", "allocations_peak"):
        getattr(counted, name).restype = ctypes.c_long
    gc.collect()
    before = counted.allocations_live()
    step = prepare()
    for _ in range(warm_up):
        step()
    gc.collect()
    peaks = []
    for _ in range(steps):
        counted.allocations_reset_peak()
        step()
        peaks.append(counted.allocations_peak() - before)
    return peaks
