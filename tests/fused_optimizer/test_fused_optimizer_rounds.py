"""A round of the fused optimiser, from one step() to the next, in which gradients and groups are changed."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

SGD = torch.optim.SGD


def fused(parameters: Any, **options: Any) -> rg.FusedOptimizer:
    return rg.FusedOptimizer(SGD, parameters, **{"lr": 0.1, **options})


def loss_of(*layers: nn.Module) -> Tensor:
    x = torch.ones(2, 3)
    for layer in layers:
        x = layer(x)
    return x.sin().sum()


@pytest.mark.parametrize("how", ["the model's zero_grad", "one by hand"])
def test_a_gradient_that_is_discarded_before_step_is_an_error(how: str) -> None:
    layer = nn.Linear(3, 3)
    optimizer = fused(layer.parameters())
    loss_of(layer).backward()
    if how == "one by hand":
        layer.bias.grad = None
    else:
        layer.zero_grad()
    with pytest.raises(RuntimeError, match="set to None between the backward pass and step"):
        optimizer.step()
    loss_of(layer).backward()  # the round is over
    optimizer.step()


def test_gradients_of_zeros_are_refused_except_after_detach() -> None:
    layer = nn.Linear(3, 3)
    optimizer = fused(layer.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="leaves gradients of zeros"):
        optimizer.zero_grad(set_to_none=False)
    optimizer.detach()
    loss_of(layer).backward()
    optimizer.zero_grad(set_to_none=False)
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("zero_grad", [False, True])
def test_parameters_of_a_group_that_was_removed_are_not_stepped(zero_grad: bool) -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = fused([{"params": first.parameters()}, {"params": last.parameters()}])
    loss_of(first, last).backward()
    optimizer.step()
    del optimizer.param_groups[0]
    if zero_grad:
        optimizer.zero_grad()
    before, moved = first.weight.detach().clone(), last.weight.detach().clone()
    loss_of(first, last).backward()
    assert first.weight.grad is not None
    first.weight.grad.norm()  # it stays, as with an ordinary optimiser
    optimizer.step()
    assert torch.equal(first.weight, before)
    assert not torch.equal(last.weight, moved)


def test_a_parameter_that_is_replaced_in_its_group_is_stepped_and_the_old_one_freed() -> None:
    old = nn.Parameter(torch.ones(3))
    optimizer = fused([old])
    old.sin().sum().backward()
    optimizer.step()
    gone, new = weakref.ref(old), nn.Parameter(torch.ones(3))
    optimizer.param_groups[0]["params"][0] = new
    del old
    new.sin().sum().backward()
    optimizer.step()
    gc.collect()
    assert not torch.equal(new, torch.ones(3))
    assert gone() is None


@pytest.mark.parametrize("refusal", ["retain_graph", "clip_norm"])
def test_after_a_refusal_the_pass_can_be_repeated_and_counts_once(refusal: str) -> None:
    layer = nn.Linear(3, 3)
    twin = copy.deepcopy(layer)
    clip = 1e9 if refusal == "clip_norm" else None
    optimizer, ordinary = fused(layer.parameters(), clip_norm=clip), SGD(twin.parameters(), lr=0.1)
    loss = loss_of(layer)
    with pytest.raises(RuntimeError):
        loss.backward(retain_graph=clip is None)
    loss = loss_of(layer)
    if clip is not None:
        with optimizer.norm_pass():
            loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    loss_of(twin).backward()
    ordinary.step()
    assert torch.equal(layer.weight, twin.weight)
    assert torch.equal(layer.bias, twin.bias)


def test_hooks_on_states_are_called() -> None:
    optimizer, called = fused([nn.Parameter(torch.ones(3))]), []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: called.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", "after saving", "before loading", "after loading"]


def test_two_fused_optimisers_of_one_parameter_are_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    first, second = fused([p]), fused([p])
    with pytest.raises(RuntimeError, match="Two FusedOptimizers have the same parameter"):
        p.sum().backward()
    del first, second


@pytest.mark.parametrize("case", ["set before", "set after", "another loss", "nothing measured", "a pass that failed"])
def test_a_norm_that_is_not_of_all_gradients_is_an_error(case: str) -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = fused([p, q], clip_norm=0.5)
    loss = p.sum()
    if case == "a pass that failed":
        with optimizer.norm_pass():
            loss.backward(retain_graph=True)
    if case == "set before":
        q.grad = torch.ones(3)

    def step() -> None:
        with optimizer.norm_pass():
            if case == "a pass that failed":
                raise RuntimeError("this one")
            if case != "nothing measured":
                loss.backward(retain_graph=True)
        if case == "set after":
            q.grad = torch.ones(3)
        (loss + 100 * q.sum() if case == "another loss" else loss).backward()
        optimizer.step()

    if case == "a pass that failed":
        with pytest.raises(RuntimeError, match="this one"):
            step()
        with pytest.raises(RuntimeError, match="needs the norm of all gradients"):
            loss.backward()
        return
    with pytest.raises(RuntimeError, match=r"not part of norm_pass|gradients from before norm_pass"):
        step()
    assert torch.equal(q, torch.ones(3))


def test_a_backward_pass_under_autocast_steps_in_full_precision() -> None:
    ends = []
    for make in (torch.optim.Adafactor, lambda p, lr: rg.FusedOptimizer(torch.optim.Adafactor, p, lr=lr)):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer, x = make(layer.parameters(), lr=0.01), torch.randn(4, 8)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                layer(x).float().square().sum().backward()
            optimizer.step()
        ends.append(layer.weight.detach())
    assert torch.equal(*ends)
