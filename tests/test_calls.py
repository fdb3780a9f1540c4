"""Calls are independent of one another: in any order, nested, in threads, and with hooks that see them once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from stacks import (
    MEMORIES,
    REBUILDING,
    Mlp,
    Noisy,
    agree,
    all_close,
    in_threads,
    memory_of,
    sample,
    seed_all,
    twins,
    twins_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg

every_memory = pytest.mark.parametrize("memory", MEMORIES)


def loss_of(y: Tensor) -> Tensor:
    return (y.sin() * y).sum()


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


@pytest.mark.parametrize("memory", REBUILDING)
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


@pytest.mark.parametrize("memory", REBUILDING)
def test_a_graph_may_go_backward_in_another_thread_and_in_two_at_once(memory: str) -> None:
    stack, reference = twins(Noisy, depth=6, memory=memory)
    seed_all()
    expected = torch.autograd.grad(loss_of(reference(sample(4, 6))), list(reference.parameters()))
    seed_all()
    loss = loss_of(stack(sample(4, 6)))
    found: list[Any] = []

    def work(_: int) -> None:
        for _ in range(3):
            found.append(torch.autograd.grad(loss, list(stack.parameters()), retain_graph=True))

    in_threads(work, 2)
    assert len(found) == 6
    for grads in found:
        all_close(grads, expected)


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
