"""y = keep * x + scale * u."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Coupling


@dataclass(frozen=True)
class Scaled(Coupling):
    """A scaled addition, `keep * target + scale * update`.

    It covers momentum networks (`keep=gamma, scale=1-gamma`), midpoint and leapfrog (`scale=2h`) and
    MEFT (`keep=λ`). The inverse divides by `keep`, and so magnifies rounding errors by
    `1/keep` per step: a small `keep` at depth needs anchors or an exact coupling.
    """

    keep: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.keep == 0:
            raise ValueError(
                "Scaled(keep=0) forgets the target, so that no inverse exists. "
                "Use a keep other than 0, or couplings.Replace() in a block whose memory is not 'reverse'."
            )

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        scaled = target if self.keep == 1 else target * self.keep
        return scaled + (update if self.scale == 1 else update * self.scale)

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        scaled = combined - (update if self.scale == 1 else update * self.scale)
        return scaled if self.keep == 1 else scaled / self.keep
