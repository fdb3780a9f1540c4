"""An exception in a branch, in its first run or in a replay, leaves no trace: the stack and its graph stay usable."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import MEMORIES, RECOMPUTING, Mlp, Noisy, agree, all_close, loss_of, sample, seed_all, twins, twins_of

every_memory = pytest.mark.parametrize("memory", MEMORIES)
recomputing = pytest.mark.parametrize("memory", RECOMPUTING)


def branches(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Mlp)]


class Failing(Noisy):
    """Fails on demand after it has drawn numbers and changed a buffer, in another ambient state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()).double())
        self.fails: list[Any] = [None, False]  # with which error, and whether in its replay

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = super().forward(x) * random.random() * numpy.random.rand() * self.count
        error, in_replay = self.fails
        if error is not None and rg.is_replaying() == in_replay:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                raise error("on purpose")
        return h


def surroundings(model: nn.Module) -> list[Any]:
    """All that an exception must leave as it was."""
    probe = sample(2).exp()
    probe.grad_fn._raw_saved_result.register_hooks(lambda t: t, lambda t: t)  # raises where hooks are left behind
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        rg.is_replaying(),
        [m.training for m in model.modules()],
        [b.tolist() for b in model.buffers()],
        [id(t) for t in (*model.parameters(), *model.buffers())],
        [p.requires_grad for p in model.parameters()],
    ]


def healthy_step(model: Any) -> Any:
    x = sample(4, 6)
    y = model(x)
    loss_of(y).backward()
    return y, x.grad


@every_memory
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_first_run_leaves_what_plain_autograd_would_leave(
    memory: str, error: type[BaseException]
) -> None:
    def scenario(model: Any) -> Any:
        branches(model)[3].fails[0] = error
        with pytest.raises(error, match="on purpose"):
            model(sample(4, 6))
        branches(model)[3].fails[0] = None
        seen = surroundings(model)[3:6], [branch.training for branch in branches(model)]
        return seen, healthy_step(model)

    agree(*twins(Failing, memory=memory), scenario)


@recomputing
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("training", [True, False])
def test_an_exception_in_a_replay_leaves_everything_as_it_was(
    memory: str, error: type[BaseException], training: bool
) -> None:
    stack, reference = twins(Failing, memory=memory)
    seed_all()
    loss = loss_of(stack(sample(4, 6)))
    stack.train(training)
    for branch in branches(stack)[:4]:
        branch.fails[:] = error, True
    before = surroundings(stack)
    for _ in range(2):
        with pytest.raises(error, match="on purpose"):
            torch.autograd.grad(loss, list(stack.parameters()), retain_graph=True)
        assert surroundings(stack) == before
    for branch in branches(stack):
        branch.fails[0] = None
    found = torch.autograd.grad(loss, list(stack.parameters()))
    seed_all()
    all_close(found, torch.autograd.grad(loss_of(reference(sample(4, 6))), list(reference.parameters())))
    reference.train(training)
    agree(stack, reference, healthy_step)


@recomputing
def test_an_error_of_a_misfit_names_the_block_and_the_branch(memory: str) -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:1]

    stack, _ = twins_of([(Mlp(), Mlp()), (Narrow(), Mlp()), (Mlp(), Mlp())], memory)
    with pytest.raises(ValueError, match=r"Block 1: Narrow returned a tensor of shape \(1, 6\).*\(4, 6\)"):
        stack(sample(4, 6))
    assert surroundings(stack)[3]
