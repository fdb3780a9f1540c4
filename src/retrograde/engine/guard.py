"""A guard that stays on in training: now and then one recomputed stream is compared with the true one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from retrograde.network.choices import check_choice
from retrograde.network.streams import Streams

from .drift import worst_error
from .observer import Observer

_SAMPLE = 4096
Action = Literal["warn", "raise"]


class DriftError(RuntimeError):
    """A recomputed stream is further from the true one than the guard tolerates."""


@dataclass(frozen=True)
class Guard:
    """Compare one block's recomputed input with a sample of the true one, every so many training calls.

    The blocks take turns. A sample is up to 4,096 entries of each stream.

    Args:
        every: how many calls with a backward pass lie between two comparisons.
        tolerance: the relative error at which it acts; 0 for exact couplings.
        action: "warn" once, or "raise" a `DriftError` in the backward pass.
    """

    every: int = 100
    tolerance: float = 1e-3
    action: Action = "warn"

    def __post_init__(self) -> None:
        if self.every < 1 or not self.tolerance >= 0:
            raise ValueError(f"A guard acts every 1 or more calls, at a tolerance of 0 or more, not {self}.")
        check_choice("action", self.action, get_args(Action))


class GuardWatch:
    """What a guard remembers from call to call."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._calls = 0
        self._warned = False

    def observer(self, blocks: list[int]) -> Observer | None:
        """Who looks into this call, of which `blocks` are reversed; None if no look is due."""
        self._calls += 1
        if not blocks or self._calls % self.guard.every:
            return None
        return _Look(self, blocks[(self._calls // self.guard.every - 1) % len(blocks)])

    def report(self, block: int, error: float) -> None:
        """Act on the error of a block's recomputed input."""
        if error <= self.guard.tolerance or (self._warned and self.guard.action == "warn"):
            return
        message = (
            f"The input of block {block} was recomputed with a relative error of {error:.3g}, past the guard's "
            f"tolerance of {self.guard.tolerance:g}: gradients of this block and those before it are off by about as "
            "much. Use an exact coupling (exact=True), anchors (max_drift=...), float32 streams, or "
            "memory='checkpoint'."
        )
        if self.guard.action == "raise":
            raise DriftError(message)
        self._warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class _Look(Observer):
    """Looks at one block in one call."""

    def __init__(self, watch: GuardWatch, block: int) -> None:
        self._watch = watch
        self._block = block

    def on_block(self, block: int, streams: Streams) -> _Sampled | None:
        return _Sampled(self._watch, block, streams) if block == self._block else None


class _Sampled:
    """Sees a sample of the streams before a block twice: in the first run, and when they are recomputed."""

    def __init__(self, watch: GuardWatch, block: int, streams: Streams) -> None:
        self._watch = watch
        self._block = block
        self._samples = [_sample(stream) for stream in streams]

    def recomputed(self, streams: Streams) -> Streams:
        self._watch.report(self._block, worst_error([_sample(s) for s in streams], self._samples))
        return streams


def _sample(stream: Tensor) -> Tensor:
    """Up to 4,096 entries of a stream, spread evenly over it."""
    flat = stream.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLE))].clone()
