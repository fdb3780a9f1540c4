"""y = u."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .base import Coupling, describe


@dataclass(frozen=True)
class Replace(Coupling):
    """The update takes the stream's place: for stage transitions that change shape or width.

    Nothing of the old stream is left, so a block with such a step cannot be reversed: its
    memory must be "checkpoint" or "store" (with "reverse" it is checkpointed).
    """

    invertible = False

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return update

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        raise NotImplementedError("couplings.Replace forgets its target and has no inverse.")

    def why_not(self, target: Tensor, update: Any) -> str | None:
        return None if isinstance(update, Tensor) else f"returned {describe(update)}, not a tensor"
