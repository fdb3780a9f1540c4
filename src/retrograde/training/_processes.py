"""One process or many: the rank of this one, how a model is parallelised over them, and its full state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retrograde.models import ReversibleLM

from ._devices import backend_for, device_named

TIMEOUT = timedelta(minutes=10)  # for which a process waits for the others


class Loss(nn.Module):
    """A language model whose forward is its loss: DDP and FSDP2 wrap `forward`."""

    def __init__(self, model: ReversibleLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


@dataclass(frozen=True)
class Process:
    """This process: its rank, the number of all processes, and the device of its tensors."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> float:
        """The mean over all processes."""
        value = value.detach().float().clone()
        if self.count > 1:
            dist.all_reduce(value)
        return value.item() / self.count

    def broadcast(self, number: int) -> int:
        """The number that the main process has."""
        if self.count == 1:
            return number
        value = torch.tensor(number, device=self.device)
        dist.broadcast(value, src=0)
        return int(value)

    def own_rows(self, rows: Tensor) -> Tensor:
        """This process's part of a batch."""
        return rows.view(self.count, -1, *rows.shape[1:])[self.rank].to(self.device)


@contextlib.contextmanager
def join_processes(device: str) -> Iterator[Process]:
    """Join the processes that torchrun started, if it did."""
    chosen = device_named(device)
    if not dist.is_torchelastic_launched():
        yield Process(0, 1, chosen)
        return
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index or 0)
    dist.init_process_group(backend_for(chosen), timeout=TIMEOUT)
    try:
        yield Process(dist.get_rank(), dist.get_world_size(), chosen)
        dist.barrier()  # no process ends while another still has something to receive from it
    finally:
        dist.destroy_process_group()


def parallelised(loss: Loss, process: Process, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
    """The model under DDP or FSDP2; unchanged if there is only one process."""
    if process.count == 1:
        return loss
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(loss)
    from torch.distributed.fsdp import fully_shard

    for block in loss.model.stack:
        fully_shard(block)
    fully_shard(loss)
    return loss


def gradient_sync(module: Any, *, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Reduce gradients over the processes, or not: accumulated parts of a batch are reduced with the last one."""
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
        module.set_requires_gradient_sync(enabled)
    is_ddp = hasattr(module, "no_sync")
    return module.no_sync() if is_ddp and not enabled else contextlib.nullcontext()


def full_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of the model and of the optimiser, in the main process. All processes must call it."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model: Any
    state: Any
    model, state = state_dict.get_state_dict(module, optimizer, options=options)
    flat = {f"{name}/{key}": value for name, values in state.get("state", {}).items() for key, value in values.items()}
    return {name.removeprefix("model."): value for name, value in model.items()}, flat


def load_full_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    model: dict[str, Tensor],
    flat: dict[str, Tensor],
    process: Process,
) -> None:
    """Load what `full_state` returned. The main process sends it to the others."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    fresh = state_dict.get_optimizer_state_dict(module, optimizer, options=options)
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=process.count > 1)
    state: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, _, part = key.rpartition("/")
        state.setdefault(name, {})[part] = value
    named: Any = {f"model.{name}": value for name, value in model.items()}
    state_dict.set_model_state_dict(module, named if process.is_main else {}, options=options)
    full: Any = {"state": state, "param_groups": fresh["param_groups"]}
    state_dict.set_optimizer_state_dict(module, optimizer, full if process.is_main else {}, options=options)
