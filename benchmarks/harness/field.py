"""The contenders at one size: built on one network, and checked to compute what plain autograd computes."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograde.engine.drift import relative_error

from .contenders import BASELINES, Contender, Run
from .settings import Network, Setting

TOLERANCE = 1e-3  # of a gradient in float32; larger errors are marked in the report


@dataclass
class Field:
    """Who runs, who does not and why, and the relative error of each one's gradients."""

    network: Network
    contenders: dict[str, Contender] = dataclasses.field(default_factory=dict)
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    distances: dict[str, float] = dataclasses.field(default_factory=dict)


def assemble(setting: Setting, contenders: Iterable[Contender], *, dtype: torch.dtype = torch.float32) -> Field:
    """Build each contender on the setting's network and run it once. One that fails is absent, with its error.

    Objects that are alive then are exempt from later garbage collections, which otherwise walk through all of torch.
    """
    gc.unfreeze()
    gc.collect()
    field = Field(setting.build().to(dtype))
    references: dict[str, list[Tensor]] = {}
    for contender in contenders:
        try:
            run = contender.build(field.network)
            results = outcome(run, field.network)
        except Exception as error:
            field.absent[contender.name] = one_line(error)
            continue
        reference = references.setdefault(contender.arithmetic, results)
        if contender.name == BASELINES[contender.arithmetic]:
            assert reference is results, "the baseline comes first"
        field.contenders[contender.name] = contender
        field.runs[contender.name] = run
        field.distances[contender.name] = relative_error(results, reference)
    clear(field.network)
    gc.freeze()
    return field


def outcome(run: Run, network: Network) -> list[Tensor]:
    """The output and the gradient of each leaf, for a loss that weighs each output differently."""
    for leaf in network.leaves:
        leaf.grad = None
    y = run(network.x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    (y * weights).sum().backward()
    missing = [tuple(leaf.shape) for leaf in network.leaves if leaf.grad is None]
    if missing:
        raise RuntimeError(f"no gradient for leaves of shapes {missing}")
    return [y.detach().clone(), *(leaf.grad.clone() for leaf in network.leaves if leaf.grad is not None)]


def clear(network: Network) -> None:
    """No gradients, and no garbage of an earlier run."""
    for leaf in network.leaves:
        leaf.grad = None
    gc.collect()


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
