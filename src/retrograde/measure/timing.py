"""Times on machines that others use too: rounds of which the fastest counts, ways taken in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
Progress = Callable[[str, int, int], None]
"""Told what is being measured, how many measurements are done, and how many there are."""

Way = Callable[[], AbstractContextManager[None]]
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


def least_seconds(
    ways: Mapping[Name, Way], seconds: Callable[[], float], progress: Progress = silent
) -> dict[Name, float]:
    """The least seconds of a step in each way, taken in turn, so that what slows one slows all.

    A way has two steps at each turn: the first finds memory as another way left it, which in training it would not.
    """
    least: dict[Name, float] = dict.fromkeys(ways, math.inf)
    total = ROUNDS * len(ways)
    for round_ in rounds(patience=4.0):  # whole steps are slower than blocks, and decide the ratios
        for i, (name, way) in enumerate(ways.items()):
            progress(f"the time of {name}", min(round_ * len(ways) + i, total), total)
            with way():
                least[name] = min(least[name], seconds(), seconds())
    return least
