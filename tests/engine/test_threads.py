"""Threads may share a module: each gets the gradients of what its own first runs saw."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import (
    MEMORIES,
    RECOMPUTING,
    Means,
    Mlp,
    Noisy,
    all_close,
    in_threads,
    loss_of,
    memory_of,
    sample,
    seed_all,
    twins,
    twins_of,
)

every_memory = pytest.mark.parametrize("memory", MEMORIES)


class Masked(nn.Module):
    """Dropout that notes the masks of its first runs by thread, or takes them from a list."""

    masks: dict[int, list[Tensor]] | None = None
    given: list[Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Mlp(), nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.given is not None:
            mask = self.given.pop(0)
        else:
            mask = torch.empty_like(x).bernoulli_(0.6)
            time.sleep(0.0005)
            if self.masks is not None and not rg.is_replaying():
                self.masks.setdefault(threading.get_ident(), []).append(mask)
        return self.outer((self.inner(x) * mask).sin())


@pytest.mark.parametrize("memory", RECOMPUTING)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("last", [Mlp, Masked], ids=["the last step draws nothing", "the last step draws"])
def test_threads_on_one_module_with_dropout_get_the_gradients_of_their_own_masks(
    memory: str, count: int, last: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    stack, reference = twins_of([(Masked(), Mlp()), (Mlp(), Masked()), (Masked(), last())], memory)
    masks: dict[int, list[Tensor]] = {}
    found: dict[int, list[Any]] = {}

    def work(seed: int) -> None:
        for _ in range(2):
            masks.pop(threading.get_ident(), None)
            x = sample(4, 6, seed=seed)
            y = stack(x)
            found[seed] = [y.detach(), *torch.autograd.grad(loss_of(y), [x, *stack.parameters()])]
        found[seed].append(masks[threading.get_ident()])

    for m in stack.modules():
        if isinstance(m, Masked):
            m.masks = masks
    in_threads(work, count)
    for seed, (*ours, drawn) in found.items():
        for m in reference.modules():
            if isinstance(m, Masked):
                m.given = drawn
        x = sample(4, 6, seed=seed)
        y = reference(x)
        all_close(ours, [y.detach(), *torch.autograd.grad(loss_of(y), [x, *reference.parameters()])])


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_graph_may_go_backward_in_another_thread_and_in_two_at_once(memory: str) -> None:
    stack, reference = twins(Noisy, depth=6, memory=memory)
    seed_all()
    expected = torch.autograd.grad(loss_of(reference(sample(4, 6))), list(reference.parameters()))
    seed_all()
    loss = loss_of(stack(sample(4, 6)))
    found: list[Any] = []

    def work(_: int) -> None:
        found.extend(torch.autograd.grad(loss, list(stack.parameters()), retain_graph=True) for _ in range(3))

    in_threads(work, 2)
    assert len(found) == 6
    for grads in found:
        all_close(grads, expected)


class Seen(Means):
    """Notes by thread the buffer that its first runs found, or takes it from a list."""

    found: dict[int, list[Tensor]] | None = None
    given: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.given is not None:
            self.means = self.given.pop(0).clone()
        if self.found is not None and not rg.is_replaying():
            self.found.setdefault(threading.get_ident(), []).append(self.means.clone())
        with torch.no_grad():
            self.means.mul_(0.5).add_(x.mean(0), alpha=0.5)
            means = self.means.clone()
        time.sleep(0.001)  # lets another thread come to this branch while this one is inside it
        return torch.tanh(self.linear(x) * means) + means


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_threads_on_one_module_replay_the_buffers_of_their_first_runs(memory: str) -> None:
    torch.manual_seed(0)
    stack, reference = twins_of([(Seen(), Mlp()), (Mlp(), Seen()), (Seen(), Mlp())], memory)
    found: dict[int, list[Tensor]] = {}
    for m in stack.modules():
        if isinstance(m, Seen):
            m.found = found
    ours: list[tuple[int, Any, list[Tensor]]] = []

    def work(seed: int) -> None:
        for _ in range(6):
            found.pop(threading.get_ident(), None)
            x = sample(4, 6, seed=seed)
            grads = torch.autograd.grad(loss_of(stack(x)), [x, *stack.parameters()])
            ours.append((seed, grads, found[threading.get_ident()]))

    in_threads(work, 3)
    for seed, grads, given in ours:
        for m in reference.modules():
            if isinstance(m, Seen):
                m.given = given
        x = sample(4, 6, seed=seed)
        all_close(grads, torch.autograd.grad(loss_of(reference(x)), [x, *reference.parameters()]))


class Meeting(nn.Module):
    """Waits in its first run until another thread is inside its own."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.inner, self.barrier = nn.Linear(6, 6).double(), barrier
        self.waits = False

    def forward(self, x: Tensor) -> Tensor:
        if self.waits and not rg.is_replaying():
            self.barrier.wait(timeout=20)
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_models_that_draw_nothing_run_at_the_same_time_in_two_threads(memory: str) -> None:
    """Each branch waits for the other thread's: with a lock around any of them, the last one too, none would end."""
    barrier = threading.Barrier(2)
    stacks = [
        rg.ReversibleSequence(
            [rg.two_stream(Meeting(barrier), Meeting(barrier)) for _ in range(3)], memory=memory_of(memory, 3)
        )
        for _ in range(2)
    ]
    for stack in stacks:  # what was never seen to run may draw, and is run alone
        loss_of(stack(sample(4, 6))).backward()
        for module in stack.modules():
            if isinstance(module, Meeting):
                module.waits = True
    in_threads(lambda i: loss_of(stacks[i](sample(4, 6))).backward(), 2)
