"""A training job: on which device, by how many ranks, sharded how, with which optimiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retrograde.fused_optimizer import FusedOptimizer
from retrograde.network.choices import check_choice

from .devices import Device

SHARDS = {
    "none": "one rank",
    "ddp": "every rank has the whole model; gradients are averaged",
    "fsdp2": "fully_shard on each block and on the model: parameters, gradients and optimiser state are sharded",
    "hsdp": "fsdp2 within a node, replicas across nodes (two replicas if there is one node)",
    "tensor": "branches split over the ranks by the factory, which takes the device mesh as `mesh`",
    "pipeline": "one stage per rank (1F1B), made by the factory, which takes `stage` and `stages`; of one micro-batch",
}
"""How a job can be sharded, and what that means."""

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """How a model is to be trained.

    Args:
        device: the device of each rank.
        ranks: how many ranks there are.
        shard: what they share; see `SHARDS`.
        optimizer: the name of an optimiser of torch.optim, whatever its case; None for that of the factory, or AdamW.
        fused: whether it steps during the backward pass, as `retrograde.FusedOptimizer` does.
        precision: None for what the model has; "bf16" or "fp16" for autocast to it, in which FSDP2 gathers parameters.
        micro_batches: of a pipeline, how many there are in a step; four per rank by default.
        stage: of a pipeline, which one to plan; the first holds the most micro-batches at once.
    """

    device: Device
    ranks: int = 1
    shard: str = "none"
    optimizer: str | None = None
    fused: bool = False
    precision: str | None = None
    micro_batches: int | None = None
    stage: int = 0

    def __post_init__(self) -> None:
        check_choice("shard", self.shard, SHARDS)
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks!r}: give the number of devices, 1 or more.")
        if self.ranks == 1 and self.shard != "none":
            raise ValueError(f"shard={self.shard!r} needs several ranks, and ranks=1. Give ranks=8, for example.")
        if self.ranks > 1 and self.shard == "none":
            raise ValueError(
                f"ranks={self.ranks} need to know what they share: choose shard from "
                f"{', '.join(repr(name) for name in SHARDS if name != 'none')}."
            )
        if self.shard == "hsdp" and self.ranks % self.replicas:
            raise ValueError(f"shard='hsdp' with ranks={self.ranks}: {self.replicas} replicas cannot be equally large.")
        if self.precision is not None:
            check_choice("precision", self.precision, _PRECISIONS)
        if self.fused and self.shard == "ddp":
            raise ValueError(
                "fused=True with shard='ddp': a fused optimiser frees gradients that DDP still has to average. Use "
                "'fsdp2', or fused=False."
            )
        if not 0 <= self.stage < self.ranks or (self.stage and self.shard != "pipeline"):
            raise ValueError(f"stage={self.stage}: the stages of a pipeline are 0 to ranks - 1, with shard='pipeline'.")
        if self.optimizer is not None:
            optimizer_named(self.optimizer)

    @property
    def replicas(self) -> int:
        """How many copies of the model the ranks hold together."""
        if self.shard == "hsdp":
            return max(2, self.ranks // self.device.per_node)
        return self.ranks if self.shard in ("ddp", "none") else 1

    @property
    def batches(self) -> int:
        """Of a pipeline: how many micro-batches a step has."""
        return self.micro_batches or 4 * self.ranks

    @property
    def in_flight(self) -> int:
        """How many micro-batches a rank holds at once: those that went forward and have not come back."""
        return min(self.ranks - self.stage, self.batches) if self.shard == "pipeline" else 1

    @property
    def factory_arguments(self) -> dict[str, int]:
        return {"stage": self.stage, "stages": self.ranks} if self.shard == "pipeline" else {}

    @property
    def data_ranks(self) -> int:
        """How many ranks have a batch of their own."""
        return 1 if self.shard in ("tensor", "pipeline") else self.ranks

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The shape of the ranks' mesh, and the names of its dimensions."""
        if self.shard == "hsdp":
            return (self.replicas, self.ranks // self.replicas), ("replicate", "shard")
        if self.shard == "pipeline":
            return (), ()  # each stage is simulated by itself
        return (self.ranks,), ("tensor" if self.shard == "tensor" else "shard",)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return None if self.precision is None else _PRECISIONS[self.precision]

    def make_optimizer(
        self, parameters: list[nn.Parameter], given: torch.optim.Optimizer | None
    ) -> torch.optim.Optimizer:
        """The optimiser of parameters that may have been sharded since the given one was made."""
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW
        options: dict[str, Any] = {}
        fused = self.fused
        if self.optimizer is not None:
            kind = optimizer_named(self.optimizer)
        elif given is not None:
            inner = getattr(given, "_inner", given) if isinstance(given, FusedOptimizer) else given
            kind, options, fused = type(inner), dict(inner.defaults), fused or inner is not given
        if not self.device.is_cpu and options.get("foreach") is None and not options.get("fused"):
            options = {**options, **_default_on_accelerators(kind)}
        return FusedOptimizer(kind, parameters, **options) if fused else kind(parameters, **options)


def optimizer_named(name: str) -> type[torch.optim.Optimizer]:
    """The optimiser of torch.optim of this name, whatever its case."""
    kinds = {kind.__name__.lower(): kind for kind in _optimizers()}
    check_choice("optimizer", name.lower(), sorted(kinds))
    return kinds[name.lower()]


def _optimizers() -> Iterable[type[torch.optim.Optimizer]]:
    unfit = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    values = [getattr(torch.optim, name) for name in torch.optim.__all__]
    kinds = [kind for kind in values if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]
    return [kind for kind in kinds if kind not in unfit]


def _default_on_accelerators(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """There, optimisers step all parameters at once unless they are told otherwise, and need temporaries for all."""
    return {"foreach": True} if "foreach" in inspect.signature(kind).parameters else {}
