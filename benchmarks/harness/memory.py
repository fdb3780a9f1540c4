"""Bytes alive at the peak of a step, without parameters and their gradients; and how they grow with depth."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from retrograde.measure import MemoryTracker

from .allocated import without_stderr
from .contenders import Contender, Run
from .field import assemble, clear
from .machine import Progress
from .settings import Network, Sweep


@contextmanager
def gradients_left_out(tracker: MemoryTracker, leaves: Iterable[Tensor]) -> Iterator[None]:
    """A context in which a gradient counts until it has been accumulated into its leaf."""

    def leave_out(leaf: Tensor) -> None:
        if leaf.grad is not None:
            tracker.ignore(leaf.grad)

    handles = [leaf.register_post_accumulate_grad_hook(leave_out) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def peak(run: Run, network: Network) -> int:
    """Live bytes at the peak of a step that starts without gradients, as the tracker of retrograde sees them."""
    clear(network)
    tracker = MemoryTracker(ignore=[*network.branches, network.x])
    with tracker, gradients_left_out(tracker, network.leaves):
        run(network.x).sum().backward()
    clear(network)
    return tracker.peak


def profiled_peak(run: Run, network: Network) -> int:
    """The same as recorded by the allocator, gradients included: no tracker sees the memory of compiled code."""
    clear(network)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with without_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run(network.x).sum().backward()
    gc.collect()
    live = most = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    clear(network)
    return most


def by_depth(
    sweep: Sweep, contenders: Sequence[Contender], progress: Progress
) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
    """For each contender its peak at each depth; and who is absent, with the reason."""
    peaks: dict[str, dict[int, int]] = {}
    absent: dict[str, str] = {}
    torch.set_num_threads(1)
    for depth in sweep.depths:
        field = assemble(sweep.at(depth), contenders)
        absent |= field.absent
        for name, run in field.runs.items():
            peaks.setdefault(name, {})[depth] = peak(run, field.network)
            progress.step(f"memory by depth: {name} at depth {depth}")
    return peaks, absent
