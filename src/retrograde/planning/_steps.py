"""Whole training steps of a model, for real: what they need, and how long they take in each of several ways."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrograde._plan import Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde.diagnose import MemoryTracker

from ._batches import arguments, cut_off, tensors_in
from ._costs import Prediction
from ._measure import ROUNDS, Progress, rounds, untouched, wait

Name = TypeVar("Name")
Way = Callable[[], AbstractContextManager[None]]
"""Sets a model up for a way to train, as long as it is open."""


def mean_square(output: Any) -> Tensor:
    """A loss for any output: the mean square of its floating-point tensors, summed."""
    means = [t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]
    if not means:
        raise ValueError(
            f"The model returned a value of type {type(output).__name__}, in which no floating-point tensor was found "
            "to make a loss of. Give a loss too, a function that makes a scalar of it."
        )
    return torch.stack(means).sum()


def step(model: nn.Module, batch: Any, loss: Any) -> None:
    """Forward and backward."""
    loss_of(model, batch, loss).backward()


def loss_of(model: nn.Module, batch: Any, loss: Any) -> Tensor:
    """Forward; raises where there is nothing to go backward from."""
    args, kwargs = cut_off(batch)
    with torch.enable_grad():
        found = loss(model(*args, **kwargs))
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"The loss is {kind}, and a training step starts from one number: return a scalar tensor.")
    if not found.requires_grad:
        raise ValueError(
            "The loss does not require grad, so that there is no backward pass to plan for: all parameters that it "
            "depends on are frozen, or the model runs without gradients. Let requires_grad be True for what is trained."
        )
    return found


def timed(model: nn.Module, batch: Any, loss: Any) -> float:
    """The seconds of a step, from cleared gradients to cleared gradients."""
    clear(model)
    start = time.perf_counter()
    step(model, batch, loss)
    wait(list(model.parameters()))
    seconds = time.perf_counter() - start
    clear(model)
    return seconds


def measured(model: nn.Module, batch: Any, *, loss: Any = None) -> Prediction:
    """The peak and the time of one real step of a model as it stands, in the terms of `predict`."""
    loss = loss or mean_square
    with undisturbed(model):
        timed(model, batch, loss)
        seconds = timed(model, batch, loss)
        with MemoryTracker(ignore=[model, *tensors_in(arguments(batch))]) as memory:
            step(model, batch, loss)
    return Prediction(memory.peak, seconds)


def least_seconds(
    ways: Mapping[Name, Way], seconds: Callable[[], float], progress: Progress | None = None
) -> dict[Name, float]:
    """The least seconds of a step in each way, taken in turn, so that what slows one slows all.

    A way has two steps at each turn: the first finds memory as another way left it, which in training it would not.
    """
    least: dict[Name, float] = dict.fromkeys(ways, math.inf)
    total = ROUNDS * len(ways)
    for round_ in rounds(patience=4.0):  # whole steps are slower than blocks, and decide the ratios
        for i, (name, way) in enumerate(ways.items()):
            if progress is not None:
                progress(f"the time of {name}", min(round_ * len(ways) + i, total), total)
            with way():
                least[name] = min(least[name], seconds(), seconds())
    return least


@contextmanager
def planned_as(stack: ReversibleSequence, memory: Plan | Sequence[Memory]) -> Iterator[None]:
    """Let a stack follow another plan for a while."""
    before = stack.memory
    stack.memory = memory
    try:
        yield
    finally:
        stack.memory = before


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """As a training step begins, without gradients; those of before, buffers and generators come back at the end."""
    with untouched(model):
        clear(model)
        yield


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
