"""What every coupling is: one way in, one way out."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class SupportsCoupling(Protocol):
    """All that a coupling of your own needs: an object with these two methods."""

    def combine(self, target: Tensor, update: Any) -> Tensor:
        """Put a branch's update into the stream."""

    def separate(self, combined: Tensor, update: Any) -> Tensor:
        """Take the same update out again, which gives the stream as it was."""


class Coupling:
    """How an update enters a stream, and how it is taken out again.

    A coupling of your own needs `combine` and `separate` alone. Deriving from this class
    is optional; it adds `fit`, which rejects a bad update before it is broadcast by accident.
    """

    invertible: bool = True
    """False for couplings that forget the target; blocks with one cannot be reversed."""

    def combine(self, target: Tensor, update: Any) -> Tensor:
        raise NotImplementedError

    def separate(self, combined: Tensor, update: Any) -> Tensor:
        raise NotImplementedError

    def fit(self, target: Tensor, update: Any) -> str | None:
        """Say what is wrong with an update for this target, or None."""
        if isinstance(update, Tensor) and update.shape == target.shape:
            return None
        return same_shape(target, update)


def same_shape(target: Tensor, update: Any) -> str | None:
    """The complaint about an update that is not a tensor of the target's shape, or None."""
    if not isinstance(update, Tensor):
        return f"returned {describe(update)}, but the coupling takes one tensor"
    if update.shape != target.shape:
        return f"returned a tensor of shape {tuple(update.shape)} for a target of shape {tuple(target.shape)}"
    return None


def describe(value: Any) -> str:
    """A value in an error message: the shapes of tensors, the types of the rest."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(describe(v) for v in value)})"
    return f"a value of type {type(value).__name__}"
