"""y = x * exp(s) + t."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Coupling, describe, why_not_same_shape


@dataclass(frozen=True)
class Affine(Coupling):
    """The coupling of normalising flows: `target * exp(log_scale) + shift`.

    The branch returns the pair `(log_scale, shift)`, or one tensor twice as wide as the
    target along `dim`, whose halves are the two. With `limit=a` the logarithm of the scale is
    kept within ±a by `a * tanh(s / a)`, so that neither the output nor the inverse explodes.
    """

    dim: int = -1
    limit: float | None = None

    def combine(self, target: Tensor, update: Any) -> Tensor:
        log_scale, shift = self._parts(update)
        return target * log_scale.exp() + shift

    def separate(self, combined: Tensor, update: Any) -> Tensor:
        log_scale, shift = self._parts(update)
        return (combined - shift) * (-log_scale).exp()

    def why_not(self, target: Tensor, update: Any) -> str | None:
        if isinstance(update, Tensor):
            if update.ndim == 0 or update.shape[self.dim] % 2:
                return f"returned {describe(update)}, which does not halve along dim {self.dim}"
        elif not (isinstance(update, (tuple, list)) and len(update) == 2):
            return (
                f"returned {describe(update)}, but an affine coupling takes (log_scale, shift) "
                f"or one tensor twice as wide along dim {self.dim}"
            )
        reasons = [why_not_same_shape(target, part) for part in self._halves(update)]
        return next(filter(None, reasons), None)

    def _halves(self, update: Any) -> tuple[Tensor, Tensor]:
        log_scale, shift = update.chunk(2, self.dim) if isinstance(update, Tensor) else update
        return log_scale, shift

    def _parts(self, update: Any) -> tuple[Tensor, Tensor]:
        log_scale, shift = self._halves(update)
        if self.limit is not None:
            log_scale = self.limit * torch.tanh(log_scale / self.limit)
        return log_scale, shift
