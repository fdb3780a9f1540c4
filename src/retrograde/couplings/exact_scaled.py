"""y = keep * x + scale * u on a fixed grid, with the bits that the multiplication loses kept aside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._grid import Grid
from .exact import Exact


@dataclass
class ExactScaled(Exact):
    """`keep * target + scale * update` on a grid, undone to the bit. For momentum networks and MEFT.

    With `keep` below 1 several streams lead to the same result: which of them it was is kept in
    1 bit an element and step for keep ≥ 1/2, 2 bits for keep ≥ 1/4, 4 for keep ≥ 1/16 and 8 for keep ≥ 1/256. These
    bits are all that grows with depth; a checkpointed momentum block keeps 64 bits an element. `Scaled` with
    memory="checkpoint" is the better choice where time matters more: it does without the arithmetic on whole numbers.

    Args:
        bits: the grid's spacing is 2^-bits, as in `Exact`.
        scale: the factor of the update.
        keep: the factor of the target, above 0.
    """

    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep <= 4 or self.side_bits > 8:
            raise ValueError(
                f"ExactScaled(keep={self.keep}) is out of range: keep must be from 1/256 to 4. A smaller one forgets "
                "as much as the stream holds: use Scaled with memory='checkpoint'."
            )

    @property
    def side_bits(self) -> int:
        """How many bits an element and step are kept aside."""
        return math.ceil(math.log2(math.ceil(1 / self.keep)))

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of streams of a dtype."""
        if dtype == torch.float64:
            raise TypeError("ExactScaled takes float32 streams, not float64, whose products are not exact. Use Scaled.")
        return Grid(dtype, self.bits)

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        grid = self.grid(target.dtype)
        kept: Tensor = _Shrunk.apply(target, self.keep, grid.spacing)  # type: ignore[no-untyped-call]
        if self.keep > 1:  # the sum may be back in range when this was not
            grid.check(kept)
        combined = kept + grid.round(self._scaled(update))
        grid.check(combined)
        return combined

    def side(self, target: Tensor) -> Tensor:
        """What `combine` forgets of a target: packed, to be given to `separate`."""
        with torch.no_grad():
            counts = target.double() / self.grid(target.dtype).spacing
            shrunk = torch.floor(counts * self.keep)
            return _pack(counts - _smallest(shrunk, self.keep), self.side_bits)

    def separate(self, combined: Tensor, update: Tensor, side: Tensor | None = None) -> Tensor:
        if side is None:
            raise ValueError(
                "ExactScaled can only be undone with the bits that a call kept aside (see side): in a backward pass, "
                "not by inverse()."
            )
        grid = self.grid(combined.dtype)
        shrunk = ((combined - grid.round(self._scaled(update))).double() / grid.spacing).round()
        counts = _smallest(shrunk, self.keep) + _unpack(side, self.side_bits, shrunk.shape)
        return (counts * grid.spacing).to(combined.dtype)


class _Shrunk(torch.autograd.Function):
    """`keep * stream`, rounded down to the grid, with the gradient of the multiplication."""

    generate_vmap_rule = True

    @staticmethod
    def forward(stream: Tensor, keep: float, spacing: float) -> Tensor:
        return (torch.floor(stream.double() / spacing * keep) * spacing).to(stream.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.keep = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.keep, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0] * ctx.keep
        return tangent


def _smallest(shrunk: Tensor, keep: float) -> Tensor:
    """The smallest whole numbers whose product with `keep`, rounded down, is `shrunk`. The same products decide."""
    guess = torch.ceil(shrunk / keep)
    guess = guess - (torch.floor((guess - 1) * keep) == shrunk).double()
    return guess + (torch.floor(guess * keep) < shrunk).double()


def _pack(values: Tensor, bits: int) -> Tensor:
    """Small whole numbers as bytes, `bits` of which each takes."""
    flat = values.reshape(-1).to(torch.uint8)
    if bits == 0:
        return flat.new_empty(0)
    each = 8 // bits
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % each)).view(-1, each)
    packed = padded[:, 0].clone()
    for i in range(1, each):
        packed |= padded[:, i] << (bits * i)
    return packed


def _unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    if bits == 0:
        return torch.zeros(shape, dtype=torch.float64, device=packed.device)
    mask = (1 << bits) - 1
    flat = torch.stack([(packed >> (bits * i)) & mask for i in range(8 // bits)], dim=1).reshape(-1)
    return flat[: shape.numel()].view(shape).double()
