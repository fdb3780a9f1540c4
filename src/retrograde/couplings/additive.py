"""y = x + u."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Coupling


@dataclass(frozen=True)
class Additive(Coupling):
    """The update is added: the coupling of RevNet, Reformer and most that followed.

    Its inverse subtracts. In floating point a + b - b is nearly a: see the docs on drift.
    """

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target + update

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined - update
