"""y = keep * x + scale * u on a fixed grid, with the bits that the multiplication loses kept aside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import SideBitCoupling, bounds_of
from .exact import Exact
from .grid import Grid
from .side_bits import pack, unpack


@dataclass(frozen=True)
class ExactScaled(Exact, SideBitCoupling):
    """`keep * target + scale * update` on a grid, undone to the bit. For momentum networks and MEFT.

    With `keep` below 1 several streams lead to the same result: which of them it was is kept in
    1 bit per element and step for keep ≥ 1/2, 2 bits for keep ≥ 1/4, 4 for keep ≥ 1/16 and 8 for keep ≥ 1/256. These
    bits are all that grows with depth; a checkpointed momentum block keeps 64 bits per element. `Scaled` with
    memory="checkpoint" is the better choice where time matters more: it does without the arithmetic on whole numbers.

    Args:
        bits: the grid's spacing is 2^-bits, as in `Exact`.
        scale: the factor of the update.
        keep: the factor of the target, above 0.
    """

    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep <= 4 or self.bits_per_element > 8:
            raise ValueError(
                f"ExactScaled(keep={self.keep}) is out of range: keep must be from 1/256 to 4. A smaller one forgets "
                "as much as the stream holds: use Scaled with memory='checkpoint'."
            )

    @property
    def bits_per_element(self) -> int:
        """How many side bits each element takes per step."""
        return math.ceil(math.log2(math.ceil(1 / self.keep)))

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of streams of a dtype."""
        if dtype == torch.float64:
            raise TypeError("ExactScaled takes float32 streams, not float64, whose products are not exact. Use Scaled.")
        return Grid(dtype, self.bits)

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        grid = self.grid(target.dtype)
        shrink: Any = _Shrunk if torch.compiler.is_compiling() else _ShrunkWithTangent
        shrunk: Tensor = shrink.apply(target, self.keep, grid.spacing)
        return shrunk + self._rounded(update, target)

    def bounds(self, target: Tensor, combined: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super().bounds(target, combined)
        if self.keep > 1:  # the sum may be back in range when the product was not
            least, most = bounds_of(target)
            low, high = torch.minimum(low, least * self.keep), torch.maximum(high, most * self.keep)
        return low, high

    def side_bits(self, target: Tensor) -> Tensor:
        with torch.no_grad():
            counts = target.double() / self.grid(target.dtype).spacing
            shrunk = torch.floor(counts * self.keep)
            return pack(counts - _smallest(shrunk, self.keep), self.bits_per_element)

    def separate(self, combined: Tensor, update: Tensor, side_bits: Tensor | None = None) -> Tensor:
        if side_bits is None:
            raise ValueError("ExactScaled can only be undone with its side bits: in a backward pass, not by inverse().")
        grid = self.grid(combined.dtype)
        shrunk = ((combined - self._rounded(update, combined)).double() / grid.spacing).round()
        counts = _smallest(shrunk, self.keep) + unpack(side_bits, self.bits_per_element, shrunk.shape)
        return (counts * grid.spacing).to(combined.dtype)


class _Shrunk(torch.autograd.Function):
    """`keep * stream`, rounded down to the grid, with the gradient of the multiplication."""

    @staticmethod
    def forward(stream: Tensor, keep: float, spacing: float) -> Tensor:
        return (torch.floor(stream.double() / spacing * keep) * spacing).to(stream.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.keep = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.keep, None, None


class _ShrunkWithTangent(_Shrunk):
    """The same for forward-mode differentiation and vmap, which a compiler does not trace."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0] * ctx.keep
        return tangent


def _smallest(shrunk: Tensor, keep: float) -> Tensor:
    """The smallest whole numbers whose product with `keep`, rounded down, is `shrunk`. The same products decide."""
    guess = torch.ceil(shrunk / keep)
    guess = guess - (torch.floor((guess - 1) * keep) == shrunk).double()
    return guess + (torch.floor(guess * keep) < shrunk).double()
