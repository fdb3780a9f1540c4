"""A guard that stays on in training: now and then one rebuilt stream is compared with what it was."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ._streams import Streams

_SAMPLE = 4096
Action = Literal["warn", "raise"]


class DriftError(RuntimeError):
    """A rebuilt stream is further from what it was than the guard tolerates."""


@dataclass(frozen=True)
class Guard:
    """Compare one block's rebuilt input with a sample of the true one, every so many training calls.

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
        if self.action not in get_args(Action):
            raise ValueError(f"action={self.action!r} is not known; choose 'warn' or 'raise'.")


class Watch:
    """What a guard remembers from call to call."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.calls = 0
        self.warned = False

    def due(self, blocks: list[int]) -> int | None:
        """The block to look at in this call, of those that are reversed, or None."""
        self.calls += 1
        if not blocks or self.calls % self.guard.every:
            return None
        return blocks[(self.calls // self.guard.every - 1) % len(blocks)]

    def report(self, block: int, error: float) -> None:
        """Act on the error found at a block's input."""
        if error <= self.guard.tolerance or (self.warned and self.guard.action == "warn"):
            return
        message = (
            f"The input of block {block} was rebuilt with a relative error of {error:.3g}, past the guard's tolerance "
            f"of {self.guard.tolerance:g}: gradients of this block and those before it are off by about as much. "
            "Use an exact coupling (exact=True), anchors (drift=...), float32 streams, or memory='checkpoint'."
        )
        if self.guard.action == "raise":
            raise DriftError(message)
        self.warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class Sampled:
    """Sees the streams before a block twice: in the first run, and when they are rebuilt."""

    def __init__(self, watch: Watch, block: int, streams: Streams) -> None:
        self._watch = watch
        self._block = block
        self._samples = [sample(stream) for stream in streams]

    def rebuilt(self, streams: Streams) -> Streams:
        """The streams to go on with; here those that were rebuilt."""
        errors = [relative_error(sample(s), kept) for s, kept in zip(streams, self._samples, strict=True)]
        self._watch.report(self._block, max(errors))
        return streams


def sample(stream: Tensor) -> Tensor:
    """Up to 4,096 entries of a stream, spread evenly over it."""
    flat = stream.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLE))].clone()


def relative_error(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> float:
    """The size of the difference in units of the expected size, of all tensors together.

    In units of 1 where the expected ones are all zero, as a velocity is at its start. Infinite where it is no number.
    """
    if isinstance(found, Tensor) or isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert isinstance(expected, Tensor)
        found, expected = [found], [expected]
    difference = norm(_wide(a) - _wide(b) for a, b in zip(found, expected, strict=True))
    size = norm(expected) or math.sqrt(sum(tensor.numel() for tensor in expected)) or 1.0
    error = difference / size
    return error if error == error else math.inf


def norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all tensors together."""
    return math.sqrt(sum(float(_wide(tensor).square().sum()) for tensor in tensors))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)
