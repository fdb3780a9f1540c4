"""Hooks fire once for gradients, in order, while the backward goes on; forward hooks can tell a replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import retrograde as rg
from stacks import (
    MEMORIES,
    Mlp,
    Noisy,
    agree,
    all_close,
    loss_of,
    sample,
    twins,
)

every_memory = pytest.mark.parametrize("memory", MEMORIES)


@every_memory
def test_hooks_of_parameters_modules_and_tensors_fire_once_and_in_order_as_the_backward_goes(memory: str) -> None:
    def scenario(model: Any) -> Any:
        seen: list[Any] = []
        parameters = list(model.parameters())

        def note(kind: str, i: int, *values: Tensor) -> None:
            """What fired, with its gradient, and how many parameters have theirs by now."""
            seen.append((f"{kind} {i}", sum(p.grad is not None for p in parameters), *(v.clone() for v in values)))

        for i, p in enumerate(parameters):
            p.register_hook(lambda g, i=i: note("parameter", i, g))
            p.register_post_accumulate_grad_hook(lambda p, i=i: note("accumulated", i, p.grad))
        for i, m in enumerate(m for m in model.modules() if isinstance(m, Mlp)):
            m.register_full_backward_pre_hook(lambda m, out, i=i: note("before branch", i, *out))
            m.register_full_backward_hook(lambda m, into, out, i=i: note("after branch", i, *into, *out))
        x = sample(4, 6)
        x.register_hook(lambda g: note("input", 0, g))
        result = model.run(x, hidden=[1])
        result.hidden[1][0].register_hook(lambda g: note("hidden", 0, g))
        loss_of(result[0] + result[1]).backward()
        assert len(seen) == 2 * len(parameters) + 2 * 6 + 2
        return seen

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_forward_hooks_of_a_branch_fire_in_both_runs_and_can_tell_them_apart(memory: str) -> None:
    stack, _ = twins(memory=memory)
    runs: list[bool] = []
    for m in stack.modules():
        if isinstance(m, Mlp):
            m.register_forward_hook(lambda *_: runs.append(rg.is_replaying()))
    loss = loss_of(stack(sample(4, 6)))
    assert runs == [False] * 6
    loss.backward()
    assert not any(runs[:6])
    assert all(runs[6:])


@every_memory
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_forward_hook_that_changes_what_a_block_returns_is_refused_or_differentiated(memory: str, block: int) -> None:
    """An inverse that starts from the changed streams would be silently wrong."""
    stack, reference = twins(memory=memory)
    stack.blocks[block].register_forward_hook(lambda m, args, out: ((out[0][0] * 2, out[0][1]), *out[1:]))
    x, z = sample(4, 6), sample(4, 6)
    try:
        y = stack(x)
    except ValueError as error:
        if "Stream 0" not in str(error):
            raise
        return
    a = b = z
    for i, (f, g) in enumerate(reference.pairs):
        a = a + f(b)
        b = b + g(a)
        a = 2 * a if i == block else a
    all_close([y, *torch.autograd.grad(loss_of(y), x)], [(a + b) / 2, *torch.autograd.grad(loss_of((a + b) / 2), z)])


@every_memory
def test_hidden_states_may_retain_their_gradients(memory: str) -> None:
    def scenario(model: Any) -> Any:
        result = model.run(sample(4, 6), hidden=[0, 1])
        kept = [*result.hidden[0], *result.hidden[1]]
        for stream in kept:
            stream.retain_grad()
        loss_of(result[0] + result[1]).backward()
        return [stream.grad for stream in kept]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_a_hook_may_call_and_differentiate_the_stack_in_the_middle_of_its_backward(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, z, found = sample(4, 6), sample(4, 6, seed=2), []

        def hook(_: Tensor) -> None:
            with torch.enable_grad():
                found.append(torch.autograd.grad(loss_of(model(z)), z))

        y = model(x)
        list(model.parameters())[8].register_hook(hook)
        loss_of(y).backward()
        return x.grad, found

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_an_optimizer_may_step_inside_the_backward(memory: str) -> None:
    def scenario(model: Any) -> Any:
        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        x = sample(4, 6)
        for _ in range(2):
            loss_of(model(x)).backward()
        return x.grad, list(model.parameters())

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_hooks_of_a_user_around_a_call_leave_its_gradients_alone(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            y = model(x, shift=shift)
        loss_of(y).backward()
        return y, x.grad, shift.grad

    agree(*twins(Noisy, memory=memory), scenario)
