"""The contenders that take part at a size: built on one network, and seen to compute what plain autograd does."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .contenders import BASELINES, Contender, Run
from .settings import Network, Setting

TOLERANCE = 1e-3  # of a gradient in float32; what is further off is said in the report


@dataclass
class Field:
    """Who runs, who does not and why, and how far each one's gradients are from plain autograd's."""

    network: Network
    contenders: dict[str, Contender] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    distances: dict[str, float] = field(default_factory=dict)


def assemble(setting: Setting, contenders: Iterable[Contender], *, dtype: torch.dtype = torch.float32) -> Field:
    """Build each contender on the setting's network and run it once. One that fails is absent, with its error.

    What is alive then is left out of later collections, which would else walk through all of torch each time.
    """
    gc.unfreeze()
    gc.collect()
    found = Field(setting.build().to(dtype))
    references: dict[str, list[Tensor]] = {}
    for contender in contenders:
        try:
            run = contender.build(found.network)
            results = outcome(run, found.network)
        except Exception as error:
            found.absent[contender.name] = one_line(error)
            continue
        reference = references.setdefault(contender.arithmetic, results)
        if contender.name == BASELINES[contender.arithmetic]:
            assert reference is results, "the baseline comes first"
        found.contenders[contender.name] = contender
        found.runs[contender.name] = run
        found.distances[contender.name] = distance(results, reference)
    clear(found.network)
    gc.freeze()
    return found


def outcome(run: Run, network: Network) -> list[Tensor]:
    """The output and the gradient of each leaf, of a loss that weighs each output differently."""
    for leaf in network.leaves:
        leaf.grad = None
    y = run(network.x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    (y * weights).sum().backward()
    missing = [tuple(leaf.shape) for leaf in network.leaves if leaf.grad is None]
    if missing:
        raise RuntimeError(f"no gradient for leaves of shapes {missing}")
    return [y.detach().clone(), *(leaf.grad.clone() for leaf in network.leaves if leaf.grad is not None)]


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The relative error of all of them as one vector."""
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    return float((off / sum(float(b.double().square().sum()) for b in expected)) ** 0.5)


def clear(network: Network) -> None:
    """No gradients, and no garbage of an earlier run."""
    for leaf in network.leaves:
        leaf.grad = None
    gc.collect()


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
