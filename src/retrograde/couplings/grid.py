"""A fixed grid for streams: multiples of 2^-bits, which floating point adds and subtracts without error.

NOTE [Why the grid is exact]
 A float32 holds every integer up to 2^24, so it holds every multiple of 2^-bits up to 2^(24 - bits). The sum
 and the difference of two such numbers are multiples of 2^-bits too; while they stay in that
 range they are held exactly. So a + b - b is a, to the bit, at any depth. In float64 the range is 2^(53 - bits).

NOTE [Rounding by two additions]
 Numbers from 2^(24 - bits) to 2^(25 - bits) are multiples of 2^(1 - bits) in float32. So adding M = 1.5 * 2^(24 - bits)
 to u rounds it to such a multiple, to nearest with ties to even, and subtracting M gives the rounded u, exactly.
 This holds for |u| < 2^(23 - bits). A larger u is a multiple of 2^-bits by itself, being a float32, and the result is
 one too: it is on the grid for every u. A smaller M would not do: with 1.5 * 2^(23 - bits), updates below
 -2^(22 - bits) would come out between the grid's values. Both operations pass gradients unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA = {torch.float32: 24, torch.float64: 53}
DEFAULT_BITS = {torch.float32: 16, torch.float64: 40}


class OutOfRangeError(ValueError):
    """A stream left the range in which its grid is exact. `bits` would have held it, or is None if none would."""

    def __init__(self, message: str, bits: int | None) -> None:
        super().__init__(message)
        self.bits = bits


class Grid:
    """The grid of one stream dtype.

    Args:
        dtype: float32 or float64.
        bits: the grid's spacing is 2^-bits.
    """

    __slots__ = ("bits", "dtype", "limit", "rounder", "spacing")

    def __init__(self, dtype: torch.dtype, bits: int | None) -> None:
        if dtype not in MANTISSA:
            raise TypeError(
                f"An exact coupling needs float32 or float64 streams, not {dtype}, which has too few bits for a grid. "
                "Give the stack stream_dtype=torch.float32; branches compute in low precision under autocast or with "
                "compute=torch.bfloat16."
            )
        self.dtype = dtype
        self.bits = DEFAULT_BITS[dtype] if bits is None else bits
        self.spacing = 2.0**-self.bits
        self.limit = 2.0 ** (MANTISSA[dtype] - self.bits)
        self.rounder = 1.5 * self.limit  # M in NOTE [Rounding by two additions]

    def round(self, tensor: Tensor) -> Tensor:
        """The nearest even multiples of 2^-bits. Gradients pass as if nothing had been rounded."""
        return (tensor.to(self.dtype) + self.rounder) - self.rounder

    def check(self, largest: float, *, later: float = 0.0) -> None:
        """Raise if the largest magnitude of a stream is out of the range in which the grid is exact.

        Args:
            later: a magnitude that is reached later in the same call, which the grid that is proposed holds too.
        """
        if largest < self.limit:  # at the limit itself a sum past it may have been rounded down to it
            return
        if not math.isfinite(largest):
            raise OutOfRangeError("reached infinity or NaN; look for a division or an overflow.", None)
        bits = bits_for(max(largest, later), self.dtype)
        raise OutOfRangeError(
            f"reached {largest:.4g}, past {self.limit:g}, up to which multiples of 2^-{self.bits} are exact in "
            f"{self.dtype}. bits={bits} would hold it, on a coarser grid: give it to the coupling or to the stack "
            f"(grid_bits={bits}), or let the stack choose (overflow='rescale').",
            bits,
        )


def bits_for(largest: float, dtype: torch.dtype, *, headroom: float = 1.0) -> int:
    """The finest grid, as its `bits`, on which values up to `headroom * largest` are exact."""
    needed = max(headroom * largest, torch.finfo(dtype).tiny)
    return MANTISSA[dtype] - math.frexp(needed)[1]  # needed < 2^that
