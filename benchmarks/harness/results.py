"""The measurements as plain data: they can be written as JSON, and are all that the report needs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from .contenders import BASELINES, PAIR, Contender
from .settings import Setting

Quartiles = tuple[float, float, float]


@dataclass
class Comparison:
    """All contenders at one size. Memory includes gradients if it is measured by the profiler, not by the tracker."""

    setting: Setting
    pair_bytes: int
    seconds: dict[str, list[float]]
    peaks: dict[str, int]
    flops: dict[str, int]
    distances: dict[str, float]
    absent: dict[str, str]
    measured_by: str = "tracker"

    def ratio(self, name: str, baseline: str) -> Quartiles:
        """Quartiles of the ratio per round: what slows the machine slows both."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high

    def to_baseline(self, contender: Contender) -> Quartiles:
        return self.ratio(contender.name, BASELINES[contender.arithmetic])

    def above_pair(self, name: str) -> float:
        """Seconds per block beyond plain autograd on a pair of streams, the median of the rounds."""
        rounds = zip(self.seconds[name], self.seconds[PAIR], strict=True)
        return statistics.median(a - b for a, b in rounds) / self.setting.depth

    def in_pairs(self, name: str) -> float:
        """The peak in units of one pair of streams."""
        return self.peaks[name] / self.pair_bytes


@dataclass
class Growth:
    """Peaks by contender and depth, at one width."""

    setting: Setting
    pair_bytes: int
    peaks: dict[str, dict[int, int]]
    absent: dict[str, str]

    def slope(self, name: str) -> float:
        """Bytes per block: the slope of the least-squares line through the depths."""
        points = self.peaks[name]
        return statistics.linear_regression(list(points), list(points.values())).slope


@dataclass
class GradientErrors:
    """The relative error of all gradients as one vector, by precision, depth and contender."""

    errors: dict[str, dict[int, dict[str, float]]]
    absent: dict[str, str]
    sizes: dict[int, str]


@dataclass
class Results:
    machine: list[str]
    quick: bool = False
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    live: Growth | None = None
    resident: dict[str, Growth] = field(default_factory=dict)  # by allocator
    gradients: GradientErrors | None = None
    minutes: float = 0.0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), default=str) + "\n", encoding="utf-8")
