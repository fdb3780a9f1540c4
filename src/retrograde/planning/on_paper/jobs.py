"""A training job: on which device, by how many ranks, sharded how, with which optimiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
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
        self._check_replicas()
        if self.precision is not None:
            check_choice("precision", self.precision, _PRECISIONS)
        self._check_micro_batches()
        if self.fused:
            self._check_fused("fused=True")
        if not 0 <= self.stage < self.ranks or (self.stage and self.shard != "pipeline"):
            raise ValueError(f"stage={self.stage}: the stages of a pipeline are 0 to ranks - 1, with shard='pipeline'.")
        if self.optimizer is not None:
            optimizer_named(self.optimizer)

    def _check_replicas(self) -> None:
        per_node = self.device.per_node
        if self.shard == "hsdp" and (self.ranks % self.replicas or (self.ranks > per_node and self.ranks % per_node)):
            raise ValueError(
                f"shard='hsdp' with ranks={self.ranks}: a node has {per_node} devices, and replicas must be whole "
                f"nodes, or two halves of one. Give an even number up to {per_node}, or a multiple of {per_node}."
            )

    def _check_micro_batches(self) -> None:
        if self.micro_batches is not None and (self.micro_batches < 1 or self.shard != "pipeline"):
            raise ValueError(
                f"micro_batches={self.micro_batches} with shard={self.shard!r}: give 1 or more, for shard='pipeline'."
            )

    def _check_fused(self, given: str) -> None:
        if self.shard == "ddp":
            raise ValueError(
                f"{given} with shard='ddp': a fused optimiser frees gradients that DDP still has to average. Use "
                "'fsdp2', or an optimiser that is not fused."
            )
        if self.shard == "pipeline" and self.batches > 1:
            raise ValueError(
                f"{given} with shard='pipeline': a fused optimiser steps after the first of {self.batches} "
                "micro-batches, whose gradients have to be added up. Use an optimiser that is not fused."
            )

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

    def is_fused(self, given: GivenOptimizer | None) -> bool:
        """Whether the optimiser steps during the backward pass. One that is named replaces that of the factory."""
        if self.optimizer is None and given is not None and given.is_fused:
            self._check_fused("The factory's FusedOptimizer")
            return True
        return self.fused

    def make_optimizer(
        self, parameters: Mapping[str, nn.Parameter], given: GivenOptimizer | None
    ) -> torch.optim.Optimizer:
        """The optimiser of a model's parameters, by their names: a named one, that of the factory, or AdamW."""
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW
        groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
        options: dict[str, Any] = {}
        if self.optimizer is not None:
            kind = optimizer_named(self.optimizer)
        elif given is not None:
            kind, groups, options = given.kind, given.groups_of(parameters), given.options
        if not self.device.is_cpu and "foreach" in inspect.signature(kind).parameters:
            # There, all parameters are stepped at once unless a group says otherwise, with temporaries for all.
            for group in groups:
                if group.get("foreach") is None and not group.get("fused"):
                    group["foreach"] = True
        try:
            return FusedOptimizer(kind, groups, **options) if self.is_fused(given) else kind(groups, **options)
        except TypeError as error:
            raise ValueError(
                f"The factory's optimiser, {kind.__name__}, cannot be made a second time from its defaults: {error}. "
                "Name one of torch.optim instead (optimizer=, --optimizer)."
            ) from error


@dataclass(frozen=True)
class GivenOptimizer:
    """The optimiser that a factory returned. Parameters are known by their names: sharding puts others in their places.

    `options` are those of its constructor, `groups` has its groups, each with the names of its parameters as "params".
    """

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    is_fused: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module) -> GivenOptimizer:
        is_fused = isinstance(optimizer, FusedOptimizer)
        kind = type(optimizer._inner if isinstance(optimizer, FusedOptimizer) else optimizer)
        accepted = inspect.signature(kind).parameters
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [{key: value for key, value in g.items() if key != "param_names"} for g in optimizer.param_groups]
        named = tuple({**group, "params": [names[p] for p in group["params"] if p in names]} for group in groups)
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        return cls(kind, options, named, is_fused)

    def groups_of(self, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """The groups, with these parameters; frozen ones are not among them."""
        return [
            {**group, "params": [parameters[name] for name in group["params"] if name in parameters]}
            for group in self.groups
        ]


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
