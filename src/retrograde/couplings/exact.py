"""y = x + u on a fixed grid, which subtraction undoes to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import Coupling
from ._grid import Grid


@dataclass
class Exact(Coupling):
    """The update is rounded to a grid of 2^-bits and added, so that the inverse gives back the same bits.

    Streams are float32 (or float64), branches compute in any dtype. The gradient passes the
    rounding as if it were not there. All steps of a stack must be exact for its inverse to be.

    Args:
        bits: the grid's spacing is 2^-bits; 16 for float32 streams and 40 for float64 ones, unless given. A
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

    exact = True

    def __post_init__(self) -> None:
        if self.bits is not None and (type(self.bits) is not int or abs(self.bits) > 100):
            raise ValueError(f"bits={self.bits!r} is no whole number from -100 to 100: the grid's spacing is 2^-bits.")

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of streams of a dtype."""
        return Grid(dtype, self.bits)

    def prepare(self, stream: Tensor) -> Tensor:
        """A stream as the stack starts with it: on the grid."""
        grid = self.grid(stream.dtype)
        prepared = grid.round(stream) + 0.0  # which makes 0.0 of -0.0: subtraction would not bring the sign back
        grid.check(prepared)
        return prepared

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        grid = self.grid(target.dtype)
        combined = target + grid.round(self._scaled(update))
        grid.check(combined)
        return combined

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined - self.grid(combined.dtype).round(self._scaled(update))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1 else update * self.scale
