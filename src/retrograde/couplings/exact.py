"""y = x + u on a fixed grid, which subtraction undoes to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import ExactCoupling
from .grid import MANTISSA, Grid


@dataclass(frozen=True)
class Exact(ExactCoupling):
    """The update is rounded to a grid and added, so that the inverse gives back the same bits.

    Streams are float32 (or float64), branches compute in any dtype. The gradient passes the
    rounding as if it were not there. All steps of a stack must be exact for its inverse to be.

    Args:
        bits: streams are multiples of 2^-bits, updates are rounded to even multiples. The default is 16 for float32
            streams and 40 for float64 ones. A
            stream of float32 must stay below 2^(24 - bits) in size, one of float64 below 2^(53 - bits).
        scale: a factor of the update.

    Examples:
        >>> import torch, retrograde as rg
        >>> coupling = rg.couplings.Exact(bits=16)
        >>> x, update = coupling.prepare(torch.randn(1000)), torch.randn(1000)
        >>> torch.equal(coupling.separate(coupling.combine(x, update), update), x)
        True
    """

    bits: int | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.bits is not None and (type(self.bits) is not int or abs(self.bits) > 100):
            raise ValueError(f"bits={self.bits!r} is no whole number from -100 to 100: the grid's spacing is 2^-bits.")
        rounders = {dtype: torch.tensor(Grid(dtype, self.bits).rounder, dtype=dtype) for dtype in MANTISSA}
        object.__setattr__(self, "_rounders", rounders)

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target + self._rounded(update, target)

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined - self._rounded(update, combined)

    def _rounded(self, update: Tensor, stream: Tensor) -> Tensor:
        """The update on the grid of the stream. See NOTE [Rounding by two additions].

        A tensor of no dimensions is added in half the time that a number takes; subclasses (DTensor, fake tensors) take
        numbers alone.
        """
        if self.scale != 1:
            update = update * self.scale
        if type(update) is not Tensor or stream.dtype not in MANTISSA:
            return self.grid(stream.dtype).round(update)
        if update.dtype != stream.dtype:
            update = update.to(stream.dtype)
        rounder: Tensor = self._rounders[stream.dtype]  # type: ignore[attr-defined]
        rounded = update + rounder
        if not rounded.requires_grad:
            return rounded.sub_(rounder)
        if torch.compiler.is_compiling():
            return rounded - rounder
        rounded.detach().sub_(rounder)  # a constant: nothing that autograd has to know, nor has it saved this tensor
        return rounded
