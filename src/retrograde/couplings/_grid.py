"""A fixed grid for streams: multiples of 2^-bits, which floating point adds and subtracts without error.

NOTE [Why the grid is exact]
 A float32 holds every integer up to 2^24, so it holds every multiple of 2^-bits up to 2^(24 - bits). The sum
 and the difference of two such numbers are multiples of 2^-bits too; while they stay in that
 range they are held exactly. So a + b - b is a, to the bit, at any depth. In float64 the range is 2^(53 - bits).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograde._torch_private import assert_in_graph, is_exporting, without_transforms

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

    __slots__ = ("bits", "dtype", "limit", "spacing")

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

    def round(self, tensor: Tensor) -> Tensor:
        """The nearest grid values, in the grid's dtype. Gradients pass as if nothing had been rounded."""
        rounded: Tensor = Rounded.apply(tensor, self.dtype, self.bits)  # type: ignore[no-untyped-call]
        return rounded

    def check(self, stream: Tensor) -> None:
        """Raise if a stream on the grid has left the range in which it is exact."""
        if not stream.numel() or stream.is_meta or is_exporting():
            return
        if torch.compiler.is_compiling():  # to read a number would break the graph at every step
            inside = stream.detach().abs().amax() < self.limit
            assert_in_graph(inside, f"A stream left the range of its grid: it reached {self.limit:g}.")
            return
        low, high = torch.aminmax(without_transforms(stream.detach()))
        largest = float(torch.maximum(-low, high))  # an accelerator is waited for once
        if largest < self.limit:  # at the limit itself a sum past it may have been rounded down to it
            return
        if not math.isfinite(largest):
            raise OutOfRangeError("reached infinity or NaN; look for a division or an overflow.", None)
        holds = bits_for(largest, self.dtype)
        raise OutOfRangeError(
            f"reached {largest:.4g}, past {self.limit:g}, up to which multiples of 2^-{self.bits} are exact in "
            f"{self.dtype}. bits={holds} would hold it, on a coarser grid: give it to the coupling or to the stack "
            f"(exact={holds}), or have the stack do it (overflow='rescale').",
            holds,
        )


def bits_for(largest: float, dtype: torch.dtype, *, headroom: float = 1.0) -> int:
    """The finest grid, as its `bits`, on which values up to `headroom * largest` are exact."""
    needed = max(headroom * largest, torch.finfo(dtype).tiny)
    return MANTISSA[dtype] - math.frexp(needed)[1]  # needed < 2^that


class Rounded(torch.autograd.Function):
    """Rounding to the grid, with the gradient of the identity (straight-through)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
        return tensor.to(dtype).mul(2.0**bits).round_().mul_(2.0**-bits)  # powers of two: no error but the rounding's

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype_before = inputs[0].dtype
        ctx.dtype_after = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype_before), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0].to(ctx.dtype_after)
        return tangent
