"""What every coupling provides, and what exact ones and those with side bits provide besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from .grid import Grid


class Coupling(ABC):
    """How an update enters a stream, and how it is taken out again.

    A coupling of your own derives from this class and defines `combine` and `separate`.
    """

    invertible: ClassVar[bool] = True
    """False for couplings that forget the target; blocks with one are checkpointed in the place of being reversed."""

    @abstractmethod
    def combine(self, target: Tensor, update: Any) -> Tensor:
        """Put a branch's update into the stream."""

    @abstractmethod
    def separate(self, combined: Tensor, update: Any) -> Tensor:
        """Take the same update out again, which gives the original stream."""

    def why_not(self, target: Tensor, update: Any) -> str | None:
        """Why this update cannot enter this target, or None. Rejects what would be broadcast by accident."""
        return why_not_same_shape(target, update)


class ExactCoupling(Coupling):
    """A coupling on a grid of 2^-bits, whose inverse gives back the same bits.

    `bits` is None for the default grid of the stream's dtype.
    """

    bits: int | None

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of streams of a dtype."""
        return Grid(dtype, self.bits)

    def prepare(self, stream: Tensor) -> Tensor:
        """A stream as the stack starts with it: on the grid, and without -0.0, whose sign subtraction loses."""
        return self.grid(stream.dtype).round(stream) + 0.0

    def bounds(self, target: Tensor, combined: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest number that must stay within the grid's limit for this step to be exact."""
        return bounds_of(combined)


class SideBitCoupling(Coupling):
    """A coupling that forgets a little of its target, and keeps that aside for the backward pass.

    The bits are all that grows with depth: a packed tensor per step.
    """

    @abstractmethod
    def side_bits(self, target: Tensor) -> Tensor:
        """What `combine` forgets of a target: packed, to be given to `separate`."""

    @abstractmethod
    def separate(self, combined: Tensor, update: Any, side_bits: Tensor | None = None) -> Tensor:
        """Take the update out again, with the bits that `side_bits` gave for the target."""


def bounds_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number in a tensor, as tensors; NaN if there is one."""
    tensor = tensor.detach()
    if not tensor.numel():
        return tensor.new_zeros(()), tensor.new_zeros(())
    low, high = torch.aminmax(tensor)
    return low, high


def why_not_same_shape(target: Tensor, update: Any) -> str | None:
    """Why an update is not a tensor of the target's shape, or None if it is."""
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
