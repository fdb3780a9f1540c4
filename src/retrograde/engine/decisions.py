"""Decisions of a branch that its replay must reuse: routing by top-k, sampling, thresholds.

A stream that is recomputed by inversion differs from the first in its last digits. Where a branch
compares (top-k, argmax, a threshold), that can flip a decision, and the replay would compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .graph_marks import is_traced, saved_in_graph
from .torch_internals import inherited_list


class Decisions:
    """What one call of a branch decided, in order, and whether this is its first run or its replay."""

    __slots__ = ("_next", "_replays", "taken")

    def __init__(self, taken: list[tuple[Tensor, int]] | None = None) -> None:
        self._replays = taken is not None
        self._next = 0
        self.taken = [] if taken is None else taken

    def settle(self, value: Tensor) -> Tensor:
        """In a first run note the value; in a replay return what was noted in its place."""
        if not self._replays:
            self.taken.append((value.detach(), value._version))
            return value
        if self._next == len(self.taken):
            raise RuntimeError(
                f"decide() was called more often in a replay than the {self._next} times of the first run."
            )
        first, version = self.taken[self._next]
        self._next += 1
        if first.shape != value.shape or first.dtype != value.dtype:
            raise RuntimeError(
                f"decide() got {tuple(value.shape)} {value.dtype} in a replay, where the first run gave "
                f"{tuple(first.shape)} {first.dtype}. Decide on tensors whose shape does not depend on the decision."
            )
        if first._version != version:
            raise RuntimeError(
                "A tensor that decide() returned was edited in place before the backward pass; edit a copy."
            )
        for watcher in _watchers():
            watcher.compared += value.numel()
            watcher.flipped += int((value != first).sum())
        return first

    def check_all_taken(self) -> None:
        """After a replay: raise if it decided less often than the first run."""
        if self._next < len(self.taken):
            raise RuntimeError(
                f"decide() was called {self._next} times in a replay, and {len(self.taken)} times in the first run."
            )


class Flips:
    """How many decisions of replays were compared with those of first runs, and how many differed."""

    def __init__(self) -> None:
        self.compared = 0
        self.flipped = 0

    @property
    def rate(self) -> float:
        return self.flipped / self.compared if self.compared else 0.0


def decide(value: Tensor) -> Tensor:
    """A discrete tensor that the replay of a branch reuses from its first run.

    Costs the bytes of the tensor until the backward pass. Outside of a reversible stack it returns
    the value unchanged.

        indices = rg.decide(scores.topk(2).indices)

    Args:
        value: indices or flags; not differentiable. Its shape must not depend on the decision.
    """
    if value.requires_grad:
        raise TypeError(
            f"decide() takes a decision (indices or flags), not a differentiable tensor of {value.dtype}: "
            "decide on the indices, and gather the values with them."
        )
    if is_traced():
        return saved_in_graph(value)
    for decisions in open_decisions():
        value = decisions.settle(value)
    return value


def open_decisions() -> list[Decisions]:
    """The decisions that are open on this thread, and on the one whose backward pass it runs.

    What a branch decides belongs to all of them.
    """
    return inherited_list("open decisions")


def _watchers() -> list[Flips]:
    return inherited_list("watchers of decisions")


@contextmanager
def deciding_as_before(taken: list[tuple[Tensor, int]]) -> Iterator[None]:
    """A context in which a branch decides as in its first run."""
    decisions = Decisions(taken)
    opened = open_decisions()
    opened.append(decisions)
    try:
        yield
    finally:
        opened.pop()
    decisions.check_all_taken()


@contextmanager
def counting_flips() -> Iterator[Flips]:
    """Count how often replays of backward passes in here would have decided otherwise than their first runs did."""
    flips, watchers = Flips(), _watchers()
    watchers.append(flips)
    try:
        yield flips
    finally:
        watchers.remove(flips)
