"""The coupling of BDIA: half of a stream, with either sign, plus the update, undone to the bit with one bit an element.

NOTE [BDIA as a step]
 Bi-directional integration approximation (Zhang, Lewis and Kleijn, 2024) trains the residual network
 x[k+1] = x[k] + h(x[k]) as

     x[k+1] = γ x[k-1] + (1 - γ) x[k] + (1 + γ) h(x[k]),    γ = ±1/2, drawn for each sample and block.

 The mean over γ is the residual network itself, which is what runs in eval. With the streams (x[k-1], x[k]) this is a
 step whose target is x[k-1]: it is multiplied by γ, and all the rest is the update. The branch draws γ, so that
 a replay draws it again, and hands its sign to the coupling with the update. On a grid, halving forgets whether the
 target was odd: that is the side bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograde.couplings import Coupling
from retrograde.couplings._grid import Grid
from retrograde.couplings.exact_scaled import _pack, _unpack


@dataclass
class SignedHalf(Coupling):
    """`sign * target / 2 + update` on a grid, for branches that return `(sign, update)`.

    Args:
        bits: the grid's spacing is 2^-bits, as in `couplings.Exact`.
    """

    bits: int | None = None

    exact = True
    side_bits = 1

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of streams of a dtype."""
        return Grid(dtype, self.bits)

    def prepare(self, stream: Tensor) -> Tensor:
        """A stream as the stack starts with it: on the grid."""
        grid = self.grid(stream.dtype)
        prepared = grid.round(stream) + 0.0  # which makes 0.0 of -0.0: the inverse would not bring the sign back
        grid.check(prepared)
        return prepared

    def fit(self, target: Tensor, update: Any) -> str | None:
        if not isinstance(update, tuple) or len(update) != 2:
            return f"returned a value of type {type(update).__name__}, but the coupling takes (sign, update)"
        return super().fit(target, update[1])

    def combine(self, target: Tensor, update: tuple[Tensor, Tensor]) -> Tensor:
        sign, rest = update
        grid = self.grid(target.dtype)
        halved: Tensor = _Halved.apply(target, sign, grid.spacing)  # type: ignore[no-untyped-call]
        combined = halved + grid.round(rest)
        grid.check(combined)
        return combined

    def side(self, target: Tensor) -> Tensor:
        """Which entries of a target are odd, in units of the grid: packed, to be given to `separate`."""
        with torch.no_grad():
            return _pack((target / self.grid(target.dtype).spacing).remainder(2), self.side_bits)

    def separate(self, combined: Tensor, update: tuple[Tensor, Tensor], side: Tensor | None = None) -> Tensor:
        if side is None:
            raise ValueError("BDIA can only be undone in a backward pass, with the bits that the forward kept aside.")
        sign, rest = update
        grid = self.grid(combined.dtype)
        halves = (combined - grid.round(rest)) * sign
        odd = _unpack(side, self.side_bits, combined.shape).to(combined.dtype)
        return halves * 2 + odd * grid.spacing


class _Halved(torch.autograd.Function):
    """`sign * stream / 2`, the half rounded down to the grid, with the gradient of the multiplication.

    The sign is held by the node and not saved: what a coupling saves makes the tape run it once more.
    """

    @staticmethod
    def forward(stream: Tensor, sign: Tensor, spacing: float) -> Tensor:
        return stream.mul(0.5 / spacing).floor_().mul_(spacing).mul_(sign).add_(0.0)  # no -0.0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gamma = inputs[1] / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.gamma, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0] * ctx.gamma
        return tangent
