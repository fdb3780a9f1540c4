"""A guard that stays on in training: now and then what is recomputed is compared with what it was."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args

from torch import Tensor

from retrograde.network.choices import check_choice
from retrograde.network.streams import Streams

from .drift import worst_error
from .observer import BranchRun, Observer
from .torch_internals import tree_flatten

_SAMPLE = 4096
_EXPLAINED = 100  # times the error of a branch's input: an update that is further off is none of rounding's doing
Action = Literal["warn", "raise"]
_shape = attrgetter("shape")


class DriftError(RuntimeError):
    """What was recomputed is further from the true value than the guard tolerates."""


@dataclass(frozen=True)
class Guard:
    """Compare what was recomputed with samples of the true values, every so many training calls.

    Two things are compared: the recomputed input of one block (blocks that are reversed take turns), which
    shows rounding; and what every branch returns in its replay, which shows branches that do not
    compute the same twice. A sample is up to 4,096 entries of each tensor.

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

    def observer(self, recomputed: list[int], inverted: list[int]) -> Observer | None:
        """Who looks into this call; None if no look is due.

        Args:
            recomputed: the blocks whose branches run again.
            inverted: those among them whose inputs are recomputed by inversion.
        """
        self._calls += 1
        if not recomputed or self._calls % self.guard.every:
            return None
        turn = self._calls // self.guard.every - 1
        return _Look(self, inverted[turn % len(inverted)] if inverted else None)

    def report(self, block: int, error: float) -> None:
        """Act on the error of a block's recomputed input."""
        if error > self.guard.tolerance:
            self._act(
                f"The input of block {block} was recomputed with a relative error of {error:.3g}, past the guard's "
                f"tolerance of {self.guard.tolerance:g}: gradients of this block and those before it are off by about "
                "as much. Use an exact coupling (exact=True), anchors (max_drift=...), float32 streams, or "
                "memory='checkpoint'."
            )

    def report_update(self, run: BranchRun, error: float, input_error: float) -> None:
        """Act on the error of what a branch returned in its replay, unless the error of its input explains it."""
        if error > self.guard.tolerance and error > _EXPLAINED * input_error:
            self._act(
                f"{run.step.name} in block {run.block} did not compute the same twice: its replay returned an update "
                f"that is off by a relative {error:.3g}, from an input that is off by {input_error:.3g}. Rounding does "
                "not explain this, and no memory mode that runs the branch again is right: gradients are wrong. "
                "Look for what it reads besides its arguments, parameters and buffers (a global counter, a clock, a "
                "file), and pass that as context; retrograde.decide() for choices by comparing; memory='store' for "
                "this block."
            )

    def _act(self, message: str) -> None:
        if self._warned and self.guard.action == "warn":
            return
        if self.guard.action == "raise":
            raise DriftError(message)
        self._warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class _Look(Observer):
    """Looks at one block's input and at all branches in one call."""

    def __init__(self, watch: GuardWatch, block: int | None) -> None:
        self._watch = watch
        self._block = block
        self._runs: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}

    def on_block(self, block: int, streams: Streams) -> _Sampled | None:
        return _Sampled(self._watch, block, streams) if block == self._block else None

    def on_step(self, run: BranchRun) -> Any:
        key = run.block, id(run.step)
        if not run.is_replay:
            sources = list(map(_sample, run.sources))
            result = run.result()
            self._runs[key] = sources, _samples(result)
            return result
        result = run.result()
        if key in self._runs:
            sources, update = self._runs[key]
            now = _samples(result)
            if list(map(_shape, now)) == list(map(_shape, update)):
                input_error = worst_error([_sample(s) for s in run.sources], sources)
                self._watch.report_update(run, worst_error(now, update) if now else 0.0, input_error)
        return result


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


def _samples(result: Any) -> list[Tensor]:
    """Samples of the tensors that a branch returned."""
    return [_sample(value) for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
