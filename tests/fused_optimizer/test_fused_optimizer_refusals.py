"""What a fused optimiser refuses: anything that needs several gradients together, or one of them twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.fused_optimizer import FusedOptimizer
from stacks import MEMORIES, Mlp, memory_of, sample
from test_fused_optimizer import SGD, Adam, AdamW, Model, assert_same_bits, fused, loss_of, tokens, train


def backward(model: Model, step: int = 0, **options: Any) -> None:
    loss_of(model(tokens(step))).backward(**options)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("between", ["nothing", "zero_grad of the model"])
def test_a_second_backward_pass_before_step_is_refused(between: str) -> None:
    model = Model()
    optimizer = fused(model)
    backward(model)
    if between != "nothing":
        model.zero_grad()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"step\(\) after every backward pass.* cannot be added up"):
        backward(model)
    assert_same_bits(weights(model), before)
    optimizer.step()
    backward(model)


def test_zero_grad_after_backward_is_refused_since_nothing_can_be_discarded() -> None:
    model = Model()
    optimizer = fused(model)
    backward(model)
    with pytest.raises(RuntimeError, match="would discard gradients that were used already"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_pass_that_keeps_its_graph_is_refused_before_any_step(options: Any) -> None:
    model = Model()
    optimizer, before = fused(model), weights(model)
    with pytest.raises(RuntimeError, match="the graph is kept for another pass"):
        backward(model, **options)
    assert_same_bits(weights(model), before)
    model.zero_grad()
    optimizer.step()


def test_autograd_grad_steps_nothing() -> None:
    model = Model()
    optimizer, before = fused(model), weights(model)
    torch.autograd.grad(loss_of(model(tokens(0))), model.shift)
    optimizer.step()
    assert_same_bits(weights(model), before)


READERS: dict[str, Callable[[Model], Any]] = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 1.0),
    "foreach": lambda model: clip_grad_norm_([model.shift], 1.0, foreach=True),
    "a norm": lambda model: model.shift.grad.norm(),  # type: ignore[union-attr]
    "a scaling": lambda model: model.shift.grad.mul_(0.5),  # type: ignore[union-attr]
    "a copy": lambda model: copy.deepcopy(model.shift.grad),
}


@pytest.mark.parametrize("reader", READERS)
def test_reading_a_gradient_after_the_backward_pass_is_an_error_that_says_why(reader: str) -> None:
    model = Model()
    optimizer = fused(model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"needs a gradient that was freed.*clip_value or clip_norm"):
        READERS[reader](model)
    assert repr(model.shift.grad) == "SpentGradient(shape=(6,))"
    optimizer.step()
    READERS["clip_grad_norm_"](model)  # now there is none, as after any zero_grad


def test_clipping_by_norm_without_its_pass_is_refused_before_any_step() -> None:
    model = Model()
    optimizer, before = fused(model, clip_norm=1.0), weights(model)
    with pytest.raises(RuntimeError, match=r"clip_norm=1.0 needs the norm of all gradients.*norm_pass"):
        backward(model)
    assert_same_bits(weights(model), before)
    model.zero_grad()
    with optimizer.norm_pass():
        backward(model)
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="norm_pass"):  # a norm is valid for one round
        backward(model)


def test_two_backward_passes_in_a_norm_pass_are_refused() -> None:
    model = Model()
    optimizer = fused(model, clip_norm=1.0)
    with optimizer.norm_pass():
        backward(model)
        with pytest.raises(RuntimeError, match="second gradient for a parameter"):
            backward(model)


def test_a_norm_pass_is_refused_without_clip_norm_and_within_a_round() -> None:
    model = Model()
    with pytest.raises(ValueError, match="this one has none"), fused(model).norm_pass():
        pass
    optimizer = fused(model, clip_norm=1.0)
    with optimizer.norm_pass():
        backward(model)
    backward(model)
    with pytest.raises(RuntimeError, match="before step"), optimizer.norm_pass():
        pass


def test_options_changed_between_backward_and_step_are_refused() -> None:
    model = Model()
    for lr, change in ((0.05, 0.1), (torch.tensor(0.05), "in place")):
        optimizer = fused(model, AdamW, lr=lr)
        backward(model)
        if change == "in place":
            optimizer.param_groups[0]["lr"].fill_(0.1)
        else:
            optimizer.param_groups[0]["lr"] = change
        with pytest.raises(RuntimeError, match=r"\['lr'\] of parameter group 0 changed between"):
            optimizer.step()
        optimizer.detach()


def test_closures_are_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match="takes no closure"):
        fused(model).step(lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("unscale_first", [False, True])
def test_gradient_scaling_is_refused(unscale_first: bool) -> None:
    model = Model().float()
    optimizer, scaler = fused(model), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(tokens(0)))).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        (scaler.unscale_ if unscale_first else scaler.step)(optimizer)


class Counting(SGD):
    """Counts its steps in the group, as some published optimisers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_an_optimiser_that_writes_into_its_groups_is_refused() -> None:
    model = Model()
    optimizer = FusedOptimizer(Counting, model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"Counting cannot be fused: its step writes \['count'\]"):
        backward(model)
    optimizer.detach()


BAD: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "no class": (TypeError, "an optimiser's class first", lambda p: FusedOptimizer(SGD(p, lr=0.1), p)),  # type: ignore[arg-type]
    "LBFGS": (TypeError, "LBFGS cannot be fused", lambda p: FusedOptimizer(torch.optim.LBFGS, p)),
    "differentiable": (ValueError, "differentiable", lambda p: FusedOptimizer(Adam, p, differentiable=True)),
    "both": (ValueError, "choose one way", lambda p: FusedOptimizer(Adam, p, clip_value=1.0, clip_norm=1.0)),
    "negative": (ValueError, "clip_value=-1.0: give", lambda p: FusedOptimizer(Adam, p, clip_value=-1.0)),
    "empty": (ValueError, "empty parameter list", lambda p: FusedOptimizer(Adam, [])),
    "pickled": (TypeError, "state_dict", lambda p: copy.deepcopy(FusedOptimizer(Adam, p))),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_fused_is_refused_with_a_reason(case: str) -> None:
    error, words, make = BAD[case]
    with pytest.raises(error, match=words):
        make(list(Mlp().parameters()))


def test_a_weight_that_two_reentrant_checkpoints_share_is_refused() -> None:
    branch = Mlp()
    optimizer = fused(branch)
    x = checkpoint(branch, sample(5, 6), use_reentrant=True)
    with pytest.raises(RuntimeError, match="cannot be added up"):
        checkpoint(branch, x, use_reentrant=True).sum().backward()
    optimizer.detach()
    optimizer = fused(branch)
    branch.zero_grad()
    x = checkpoint(branch, sample(5, 6), use_reentrant=False)
    checkpoint(branch, x, use_reentrant=False).sum().backward()
    optimizer.step()


class Detached(nn.Module):
    """Multiplies by a weight of another module, without a gradient for it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.detach()[:6, :6]


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_weight_that_an_earlier_block_uses_without_a_gradient_is_refused(memory: str) -> None:
    """The later block completes its gradient, and the earlier one must be replayed with the old weight."""
    last = Mlp()
    pairs = [(Detached(last.inner.weight), Mlp()), (Mlp(), Mlp()), (last, Mlp())]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=memory_of(memory, 3))
    optimizer = fused(stack)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(stack(sample(5, 6))).backward()
    stack.zero_grad()
    optimizer.detach()

    apart = [last.inner.weight]  # the remedy is an ordinary optimiser for it
    optimizer = FusedOptimizer(SGD, [p for p in stack.parameters() if p is not apart[0]], lr=0.05)
    ordinary = SGD(apart, lr=0.05)
    loss_of(stack(sample(5, 6))).backward()
    optimizer.step()
    ordinary.step()


def test_after_a_backward_pass_that_fails_half_way_training_can_continue_from_a_state_dict() -> None:
    model = Model()
    optimizer = fused(model)
    start, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def fail(_: Tensor) -> None:
        raise ArithmeticError("half-way")

    handle = list(model.stack.blocks)[1].steps[0].branch.inner.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        backward(model)
    handle.remove()
    with pytest.raises(RuntimeError, match="failed half-way"):
        optimizer.zero_grad()
    model.load_state_dict(start)
    optimizer.load_state_dict(state)
    model.zero_grad()
    train(model, optimizer, 2)
    twin = Model()
    train(twin, fused(twin), 2)
    assert_same_bits(weights(model), weights(twin))
