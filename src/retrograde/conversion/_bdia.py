"""The coupling of BDIA: half of a stream, with either sign, plus the update; undone with one side bit per element.

NOTE [BDIA as a step]
 Bi-directional integration approximation (Zhang, Lewis and Kleijn, 2024) trains the residual network
 x[k+1] = x[k] + h(x[k]) as

     x[k+1] = γ x[k-1] + (1 - γ) x[k] + (1 + γ) h(x[k]),    γ = ±1/2, drawn per sample and block.

 The mean over γ is the residual network itself, which runs in eval. With the streams (x[k-1], x[k]) this is a
 step whose target is x[k-1]: the target is multiplied by γ, and everything else is the update. The branch draws γ, so
 that a replay draws the same, and returns its sign together with the update. On a grid, halving loses whether the
 target was odd: that is the side bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograde.couplings import ExactCoupling, SideBitCoupling
from retrograde.couplings.side_bits import pack, unpack


@dataclass(frozen=True)
class SignedHalf(ExactCoupling, SideBitCoupling):
    """`sign * target / 2 + update` on a grid, for branches that return `(sign, update)`.

    Args:
        bits: the grid's spacing is 2^-bits, as in `couplings.Exact`.
    """

    bits: int | None = None

    def why_not(self, target: Tensor, update: Any) -> str | None:
        if not isinstance(update, tuple) or len(update) != 2:
            return f"returned a value of type {type(update).__name__}, but the coupling takes (sign, update)"
        return super().why_not(target, update[1])

    def combine(self, target: Tensor, update: tuple[Tensor, Tensor]) -> Tensor:
        sign, rest = update
        grid = self.grid(target.dtype)
        if torch.compiler.is_compiling():  # no compiler traces a function with a rule for forward-mode differentiation
            half = target * (sign / 2)
            halved = half + (_half_on_grid(target, sign, grid.spacing) - half).detach()  # exact: half a spacing, or 0
        else:
            halved = _Halved.apply(target, sign, grid.spacing)  # type: ignore[no-untyped-call]
        return halved + grid.round(rest)

    def side_bits(self, target: Tensor) -> Tensor:
        """Which entries of a target are odd, in units of the grid."""
        with torch.no_grad():
            return pack((target / self.grid(target.dtype).spacing).remainder(2), 1)

    def separate(self, combined: Tensor, update: tuple[Tensor, Tensor], side_bits: Tensor | None = None) -> Tensor:
        if side_bits is None:
            raise ValueError("BDIA can only be undone in a backward pass, with its side bits.")
        sign, rest = update
        grid = self.grid(combined.dtype)
        halves = (combined - grid.round(rest)) * sign
        odd = unpack(side_bits, 1, combined.shape).to(combined.dtype)
        return halves * 2 + odd * grid.spacing


def _half_on_grid(stream: Tensor, sign: Tensor, spacing: float) -> Tensor:
    return stream.mul(0.5 / spacing).floor_().mul_(spacing).mul_(sign).add_(0.0)  # no -0.0


class _Halved(torch.autograd.Function):
    """`sign * stream / 2`, the half rounded down to the grid, with the gradient of the multiplication.

    The sign is an attribute of the node, not a saved tensor: the tape would recompute the coupling for a saved one.
    """

    @staticmethod
    def forward(stream: Tensor, sign: Tensor, spacing: float) -> Tensor:
        return _half_on_grid(stream, sign, spacing)

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
