"""Times on machines that others use too: rounds of which the fastest counts, ways taken in turn."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
Progress = Callable[[str, int, int], None]
"""Told what is being measured, how many measurements are done, and how many there are."""

Way = Callable[[], AbstractContextManager[Any]]
"""Sets a model up for a way to train, for as long as it is open."""

ROUNDS = 3
_PATIENCE = 2.0  # seconds, for more rounds where runs are quick


def silent(what: str, done: int, total: int) -> None:
    """The progress of which nobody wants to be told."""


def rounds(patience: float = 1.0) -> Iterator[int]:
    """How often to take a time, of which the least counts: it is the one that nothing else on the machine disturbed."""
    start = time.perf_counter()
    for i in range(4 * ROUNDS):
        if i < ROUNDS or time.perf_counter() - start < patience * _PATIENCE:
            yield i


def wait_for_devices(tensors: Sequence[Tensor]) -> None:
    """Accelerators work on while Python goes ahead; a clock must wait for them."""
    for device in {t.device for t in tensors if t.device.type not in ("cpu", "meta")}:
        torch.accelerator.synchronize(device)  # that of MPS takes no device


def seconds_in_turn(
    ways: Mapping[Name, Way],
    seconds: Callable[[], float],
    turns: Iterable[int] | None = None,
    progress: Progress = silent,
) -> dict[Name, list[float]]:
    """The seconds of a step in each way at each turn, in a random order, so that what slows one slows all.

    A way has two steps at each turn, and the second counts: the first finds memory and couplings as another way left
    them, which in training it would not.
    """
    taken: dict[Name, list[float]] = {name: [] for name in ways}
    order, names = random.Random(0), list(ways)
    total = (ROUNDS if turns is None else len(turns := list(turns))) * len(names)
    with _no_automatic_collection():
        # Whole steps are slower than blocks, and decide the ratios: they get more patience.
        for turn in rounds(patience=4.0) if turns is None else turns:
            gc.collect()  # between the steps, not in one
            for i, name in enumerate(order.sample(names, len(names))):
                progress(f"the time of {name}", min(turn * len(names) + i, total), total)
                with ways[name]():
                    seconds()
                    taken[name].append(seconds())
    return taken


def least_seconds(
    ways: Mapping[Name, Way], seconds: Callable[[], float], progress: Progress = silent
) -> dict[Name, float]:
    """The least seconds of a step in each way, taken in turn."""
    return {name: min(taken) for name, taken in seconds_in_turn(ways, seconds, progress=progress).items()}


@contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """A context in which garbage is collected on call, from new objects only: in a large process, all take long."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
