"""Several processes on parts of a batch, compared with one process on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stacks import TIGHT, assert_close, sample

WIDTH = 6
BATCH = 8

Scenario = Callable[[Any, Tensor], Tensor]
"""What is done with a model and a batch: a loss that is a mean over the batch."""


def mean_loss(y: Tensor) -> Tensor:
    """A mean over the batch, and not of squares, so that no gradient is zero by accident."""
    return (y.sin() * y).mean()


def once(model: Any, x: Tensor) -> Tensor:
    """The scenario of most cases."""
    return mean_loss(model(x))


def batch(step: int = 0, width: int = WIDTH) -> Tensor:
    return sample(BATCH, 3, width, seed=100 + step, grad=False)


def part(x: Tensor, index: int | None = None, count: int | None = None) -> Tensor:
    """This process's share of a batch, or another's."""
    index = dist.get_rank() if index is None else index
    return x.chunk(count or dist.get_world_size())[index]


def follow(parallel: Any, reference: Any, scenario: Scenario = once, *, steps: int = 3, **options: Any) -> None:
    """Train both, one on a part of each batch and the other on all of it; gradients agree at every step."""
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in (parallel, reference)]
    for step in range(steps):
        x = batch(step)
        for model, data in ((parallel, part(x, **options)), (reference, x)):
            model.zero_grad()
            torch.manual_seed(step)
            scenario(model, data).backward()
        gradients_agree(parallel, reference)
        for optimiser in optimisers:
            optimiser.step()
    for ours, theirs in zip(parallel.parameters(), reference.parameters(), strict=True):
        assert_close(whole(ours), theirs, 10 * TIGHT, "parameter after training")


def gradients_agree(parallel: nn.Module, reference: nn.Module, tolerance: float = TIGHT) -> None:
    """Every parameter has the gradient that it has in the reference, or none in both."""
    for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        missing = ours.grad is None or theirs.grad is None
        assert_close(None if missing and ours.grad is None else whole(ours.grad), theirs.grad, tolerance, name)


def whole(tensor: Any) -> Any:
    """The full tensor, where each process has a part of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
