"""The bytes that a process has allocated, from its first tensor on, as the allocator itself tells."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    What a collective allocates for itself (gloo's reduce-scatter copies its input) lasts as long as the collective at
    most, but is often freed on a thread of gloo, where the profiler sees nothing: it would count to the end of the run.
    """
    begun = 0
    allocated: dict[int, tuple[int, int, int | None]] = {}  # by address: time, bytes, end of the collective around it
    changes: list[tuple[int, int]] = []
    for event, collective_end in sorted(_walk(tree, None), key=lambda pair: int(pair[0].start_time_ns)):
        if event.name == _MARK:
            begun = event.start_time_ns
        if event.name != "[memory]":
            continue
        time, size, address = event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            _end_unseen(allocated.pop(address, None), time, changes)
            allocated[address] = time, size, collective_end
            changes.append((time, size))
        elif allocated.pop(address, None) is not None:
            changes.append((time, size))
    for left in allocated.values():
        _end_unseen(left, None, changes)
    return begun, sorted(changes)


def _end_unseen(left: tuple[int, int, int | None] | None, reused: int | None, changes: list[tuple[int, int]]) -> None:
    """Free what was freed unseen: at the end of the collective around it, or when its address was used again."""
    if left is None:
        return
    end = left[2] or reused
    if end is not None:
        changes.append((end, -left[1]))


def _walk(events: list[Any], collective_end: int | None) -> Iterator[tuple[Any, int | None]]:
    for event in events:
        inside = event.end_time_ns if collective_end is None and event.name.startswith("c10d::") else collective_end
        yield event, inside
        yield from _walk(event.children, inside)
