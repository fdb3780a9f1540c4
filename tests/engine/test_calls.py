"""Calls are independent of one another: in any order, nested, in threads, and with hooks that see them once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from stacks import (
    MEMORIES,
    Mlp,
    Noisy,
    agree,
    loss_of,
    memory_of,
    sample,
    twins,
    twins_of,
)

every_memory = pytest.mark.parametrize("memory", MEMORIES)


@every_memory
@pytest.mark.parametrize("order", ["sum", "first call first", "second call first"])
def test_two_calls_before_their_backward_keep_their_own_draws(memory: str, order: str) -> None:
    def scenario(model: Any) -> Any:
        x, z = sample(4, 6), sample(3, 6, seed=2)
        losses = [loss_of(model(x)), loss_of(model(z))]
        if order == "sum":
            (losses[0] + 2 * losses[1]).backward()
        for loss in {"sum": [], "first call first": losses, "second call first": losses[::-1]}[order]:
            loss.backward()
        return x.grad, z.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_a_stack_may_be_applied_to_its_own_output(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(model(model(x)))
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_a_no_grad_call_in_between_changes_nothing(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        with torch.no_grad():
            between = model(x)
        loss_of(y).backward()
        return y, between, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("then", ["eval", "train"])
def test_backward_uses_the_training_mode_of_its_forward(memory: str, then: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        model.train(then == "eval")
        y = model(x)
        model.train(then == "train")
        loss_of(y).backward()
        return y, x.grad, [m.training for m in model.modules() if isinstance(m, (Mlp, nn.Dropout))]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_a_part_in_another_training_mode_than_its_branch_stays_so(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
        dropouts[1].eval()
        y = model(x)
        for dropout in dropouts:
            dropout.train(not dropout.training)
        loss_of(y).backward()
        return x.grad, [d.training for d in dropouts]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_backward_in_eval_mode_gives_the_gradients(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        model.eval()
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("depth", [1, 3])
def test_a_second_and_a_third_backward_over_a_retained_graph_add_the_same(memory: str, depth: int) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward(retain_graph=True)
        y.pow(3).sum().backward(retain_graph=True)
        loss_of(y).backward()
        return x.grad

    agree(*twins(Noisy, depth=depth, memory=memory), scenario)


@every_memory
def test_a_graph_without_retain_graph_is_walked_once_and_then_refused(memory: str) -> None:
    stack, _ = twins(memory=memory)
    y = stack(sample(4, 6))
    loss = loss_of(y)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every_memory
def test_hidden_states_may_be_differentiated_from_the_shallowest_to_the_deepest(memory: str) -> None:
    """Each backward jumps forward over the state that the one before it had come back to."""

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        result = model.run(x, hidden=[0, 1, 2, 3])
        for i in (0, 2, 1, 3):
            loss_of(result.hidden[i][0] + 2 * result.hidden[i][1]).backward(retain_graph=True)
        loss_of(result[0]).backward()
        return x.grad

    agree(*twins(Noisy, depth=4, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_branch_gives_the_gradients(memory: str, reentrant: bool) -> None:
    class Checkpointed(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant).sin()

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Checkpointed, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_stack_inside_a_checkpoint_gives_the_gradients(memory: str, reentrant: bool) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        h = checkpoint(model, x, use_reentrant=reentrant)
        y = checkpoint(lambda h: model(h.sin()), h, use_reentrant=reentrant)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_stack_with_context_inside_a_checkpoint_gives_the_gradients(memory: str, reentrant: bool) -> None:
    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        y = checkpoint(lambda x, shift: model(x, shift=shift), x, shift, use_reentrant=reentrant)
        loss_of(y).backward()
        return y, x.grad, shift.grad

    agree(*twins(Noisy, memory=memory), scenario)


class Nested(nn.Module):
    """A branch that is a stack of its own, or the plain loop over the same branches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.inner(x, **({} if shift is None else {"shift": shift})).cos()


@every_memory
@pytest.mark.parametrize("inner", ["checkpoint", "reverse", "mixed"])
def test_a_stack_inside_a_branch_gives_the_gradients(memory: str, inner: str) -> None:
    nested = [[twins(Noisy, depth=2, memory=inner) for _ in range(2)] for _ in range(3)]
    for block in nested:
        for ours, theirs in block:
            noise = torch.randn(1).item()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                p.data += noise
                q.data += noise
    stack, _ = twins_of([tuple(Nested(ours) for ours, _ in block) for block in nested], memory)
    _, reference = twins_of([tuple(Nested(theirs) for _, theirs in block) for block in nested], memory)

    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        y = model(x, shift=shift)
        loss_of(y).backward()
        return y, x.grad, shift.grad

    agree(stack, reference, scenario)


@every_memory
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_branch_may_differentiate_inside_its_own_forward(memory: str, create_graph: bool) -> None:
    class Energy(Noisy):
        """The gradient of an energy of the input."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(x).pow(2).sum(), x, create_graph=create_graph)
            return force * 0.1 + self.outer.weight.sum() * x.sin()

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Energy, memory=memory), scenario)


class SavedReadTwice(torch.autograd.Function):
    """x * y, whose backward reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return grad * y, grad * x


@every_memory
def test_a_function_that_reads_its_saved_tensors_twice_gives_the_gradients(memory: str) -> None:
    class Twice(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            h = SavedReadTwice.apply(super().forward(x), x.sin())
            return SavedReadTwice.apply(h, h.cos() + self.outer.bias)

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward(retain_graph=True)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Twice, memory=memory), scenario)


def test_the_memory_of_one_call_may_be_chosen_for_that_call_alone() -> None:
    stack, reference = twins(Noisy, memory="reverse")
    for memory in MEMORIES:

        def scenario(model: Any, memory: str = memory) -> Any:
            x = sample(4, 6)
            option = {"memory": memory_of(memory, 3)} if model is stack else {}
            y = model(x, **option)
            grads = torch.autograd.grad(loss_of(y), [x, *model.parameters()])
            return y, grads

        agree(stack, reference, scenario)
    assert stack.memory == rg.Plan(("reverse",) * 3)
