"""One process or many: which one this is, how a model is shared between them, and its whole state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retrograde.models import ReversibleLM

from ._config import ConfigError

LATE = timedelta(minutes=10)  # a process that waits longer than this for another gives up


class Loss(nn.Module):
    """A language model whose call gives its loss: what wrappers (DDP, FSDP2) wrap is what is called."""

    def __init__(self, model: ReversibleLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and where its tensors live."""

    rank: int
    count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> float:
        """The mean over all processes."""
        value = value.detach().float().clone()
        if self.count > 1:
            dist.all_reduce(value)
        return value.item() / self.count

    def told(self, number: int) -> int:
        """The number that the first process has."""
        if self.count == 1:
            return number
        value = torch.tensor(number, device=self.device)
        dist.broadcast(value, src=0)
        return int(value)

    def share(self, rows: Tensor) -> Tensor:
        """This process's part of a batch."""
        return rows.view(self.count, -1, *rows.shape[1:])[self.rank].to(self.device)


@contextlib.contextmanager
def joined(device: str) -> Iterator[Place]:
    """Join the processes that torchrun started, if it did."""
    where = _device(device)
    if not dist.is_torchelastic_launched():
        yield Place(0, 1, where)
        return
    if where.type != "cpu":
        torch.accelerator.set_device_index(where.index or 0)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=LATE)
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), where)
        dist.barrier()  # nobody leaves while another still has something to receive from it
    finally:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    try:
        found = torch.device(name) if name != "auto" else torch.accelerator.current_accelerator(check_available=True)
        found = found or torch.device("cpu")
        if found.type not in ("cpu", "meta") and found.index is None:
            found = torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.empty(1, device=found).add_(1).item()
    except Exception as error:  # what it is differs by device
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f'training.device = "{name}" cannot be used here: {reason}') from None
    return found


def shared(loss: Loss, place: Place, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
    """The model under DDP or FSDP2, or as it is where there is one process alone."""
    if place.count == 1:
        return loss
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(loss)
    from torch.distributed.fsdp import fully_shard

    for block in loss.model.stack.blocks:
        fully_shard(block)
    fully_shard(loss)
    return loss


@contextlib.contextmanager
def unsynchronised(module: Any, *, when: bool) -> Iterator[None]:
    """Leave the gradients of this process alone, as long as more parts of the batch are to come."""
    if not when:
        yield
    elif hasattr(module, "no_sync"):
        with module.no_sync():
            yield
    elif hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
    else:
        yield


def whole_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's and the optimiser's tensors, all of them, in the first process. All processes must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model: Any
    state: Any
    model, state = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    flat = {f"{name}/{key}": value for name, values in state.get("state", {}).items() for key, value in values.items()}
    return {name.removeprefix("model."): value for name, value in model.items()}, flat


def put_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, model: dict[str, Tensor], flat: dict[str, Tensor], place: Place
) -> None:
    """Bring back what `whole_state` gave. The first process sends it to the others."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    groups: Any = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))[
        "param_groups"
    ]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=place.count > 1)
    state: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, _, part = key.rpartition("/")
        state.setdefault(name, {})[part] = value
    named: Any = {f"model.{name}": value for name, value in model.items()}
    set_model_state_dict(module, named if place.leads else {}, options=options)
    whole: Any = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(module, optimizer, whole if place.leads else {}, options=options)
