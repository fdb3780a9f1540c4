"""One training step of a model, forward and backward: its loss, its seconds, its peak."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .batches import arguments, own_arguments, tensors_in
from .device_memory import accelerator_of
from .loss import Loss, check_loss, default_loss
from .memory_tracker import MemoryTracker
from .stacks import parameters_of
from .timing import wait_for_devices


def loss_of(model: nn.Module, batch: Any, loss: Loss | None = None) -> Tensor:
    """The forward pass; raises if no backward pass can start from its loss."""
    args, kwargs = own_arguments(batch)
    with torch.enable_grad():
        return check_loss((loss or default_loss)(model(*args, **kwargs)))


def step_seconds(model: nn.Module, batch: Any, loss: Loss | None = None) -> float:
    """The seconds of a step, from cleared gradients to cleared gradients."""
    parameters = parameters_of(model)
    clear_gradients(parameters)
    start = time.perf_counter()
    loss_of(model, batch, loss).backward()
    wait_for_devices([*parameters, *model.parameters()])
    seconds = time.perf_counter() - start
    clear_gradients(parameters)
    return seconds


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop the gradients, as `zero_grad` does for those of a module's own parameters."""
    for parameter in parameters:
        parameter.grad = None


def step_tracker(model: nn.Module, batch: Any) -> MemoryTracker:
    """A tracker that counts what a step allocates: not the model and its gradients, nor the batch.

    For a model on an accelerator it counts the memory there, not the host's.
    """
    given, trained = tensors_in(arguments(batch)), parameters_of(model)
    return MemoryTracker(ignore=[model, *trained, *given], kind=accelerator_of([*model.parameters(), *trained, *given]))


def step_peak(model: nn.Module, batch: Any, loss: Loss | None = None) -> int:
    """The most bytes that a step has alive in addition to the model and the batch, from cleared gradients."""
    clear_gradients(parameters_of(model))
    with step_tracker(model, batch) as memory:
        loss_of(model, batch, loss).backward()
    return memory.peak
