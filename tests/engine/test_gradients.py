"""Every gradient is the one that plain autograd gives: of the input, the parameters, the context, and at any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import retrograde as rg
from stacks import MEMORIES, Mlp, Noisy, agree, all_close, loss_of, memory_of, plain, sample, twins, twins_of

every_memory = pytest.mark.parametrize("memory", MEMORIES)


@every_memory
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_outputs_and_gradients_are_those_of_autograd(memory: str, depth: int) -> None:
    def scenario(model: Any) -> Any:
        x, shift, mask = sample(4, 6), sample(6, seed=2), sample(4, 6, seed=3, grad=False)
        y = model(x, shift=shift, mask=mask)
        loss_of(y).backward()
        return y, x.grad, shift.grad

    agree(*twins(depth=depth, memory=memory), scenario)


@every_memory
def test_dropout_in_a_branch_gives_the_gradients_of_the_mask_it_drew(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad, torch.rand(3)

    agree(*twins(Noisy, memory=memory), scenario)


def as_function_of_all(stack: rg.ReversibleSequence) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The stack as a function of its input, a context tensor and every parameter, for gradcheck."""
    names = [name for name, _ in stack.named_parameters()]

    def function(x: Tensor, shift: Tensor, *parameters: Tensor) -> Tensor:
        by_name = dict(zip(names, parameters, strict=True))
        return functional_call(stack, by_name, (x,), {"shift": shift})

    given = (sample(2, 3), sample(3, seed=2), *(p.detach().clone().requires_grad_() for p in stack.parameters()))
    return function, given


@every_memory
def test_gradcheck_holds_for_input_context_and_parameters(memory: str) -> None:
    function, given = as_function_of_all(twins(lambda: Mlp(3), depth=2, memory=memory)[0])
    assert torch.autograd.gradcheck(function, given)


@every_memory
def test_gradgradcheck_holds_for_input_context_and_parameters(memory: str) -> None:
    function, given = as_function_of_all(twins(lambda: Mlp(3), depth=2, memory=memory)[0])
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


@every_memory
@pytest.mark.parametrize("who", ["both streams", "stream 0", "stream 1", "context", "parameters"])
def test_what_requires_grad_gets_it_and_nothing_else_is_needed(memory: str, who: str) -> None:
    def scenario(model: Any) -> Any:
        model.requires_grad_(who == "parameters")
        a = sample(4, 6, grad=who in ("both streams", "stream 0"))
        b = sample(4, 6, seed=2, grad=who in ("both streams", "stream 1"))
        shift = sample(6, seed=3, grad=who == "context")
        y = model((a, b), shift=shift)
        loss_of(y).backward()
        return y, a.grad, b.grad, shift.grad

    agree(*twins(memory=memory), scenario)


@every_memory
def test_a_context_that_requires_grad_for_the_last_block_only_gets_it(memory: str) -> None:
    class Shifted(Mlp):
        def forward(self, x: Tensor, late: Tensor) -> Tensor:
            return super().forward(x, late)

    def scenario(model: Any) -> Any:
        model.requires_grad_(False)
        late = sample(6, seed=3)
        y = model(sample(4, 6, grad=False), late=late)
        loss_of(y).backward()
        return y, late.grad

    class Unshifted(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    agree(*twins_of([(Unshifted(), Unshifted()), (Unshifted(), Shifted()), (Shifted(), Unshifted())], memory), scenario)


@every_memory
@pytest.mark.parametrize("frozen", [(0,), (5,), (0, 1, 2), (1, 3, 5), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("input_grad", [False, True])
def test_frozen_branches_get_no_gradient_and_change_no_other(
    memory: str, frozen: tuple[int, ...], input_grad: bool
) -> None:
    stack, reference = twins(memory=memory)
    for model in (stack, reference):
        branches = [m for m in model.modules() if isinstance(m, Mlp)]
        for i in frozen:
            branches[i].requires_grad_(False)

    def scenario(model: Any) -> Any:
        x = sample(4, 6, grad=input_grad)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(stack, reference, scenario)


@every_memory
def test_single_frozen_parameters_get_no_gradient(memory: str) -> None:
    def scenario(model: Any) -> Any:
        for i, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(i % 3 == 1)
        y = model(sample(4, 6, grad=False))
        loss_of(y).backward()
        return y

    agree(*twins(memory=memory), scenario)


def tied_pairs(kind: str) -> list[tuple[nn.Module, nn.Module]]:
    if kind == "one branch everywhere":
        return [(shared := Mlp(), shared)] * 3
    f = Mlp()
    if kind == "f in every block":
        return [(f, Mlp()) for _ in range(3)]
    pairs = [(Mlp(), Mlp()) for _ in range(3)]
    for f, g in pairs:
        f.inner.weight = pairs[0][0].inner.weight
        g.outer.bias = f.outer.bias
    return pairs


@every_memory
@pytest.mark.parametrize("kind", ["one branch everywhere", "f in every block", "single parameters"])
def test_tied_parameters_get_the_sum_of_their_gradients(memory: str, kind: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins_of(tied_pairs(kind), memory), scenario)


@every_memory
def test_one_block_may_stand_in_several_places_of_a_stack(memory: str) -> None:
    stack, reference = twins(depth=1, memory="store")
    tied = rg.ReversibleSequence([stack.blocks[0]] * 4, memory=memory_of(memory, 4))
    reference.pairs = reference.pairs * 4

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        loss_of(model(x)).backward()
        return x.grad

    agree(tied, reference, scenario)


@every_memory
def test_unused_parameters_get_none(memory: str) -> None:
    class Idle(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Parameter(torch.ones(3).double())

    def scenario(model: Any) -> Any:
        loss_of(model(sample(4, 6))).backward()
        return [name for name, p in model.named_parameters() if p.grad is None and not name.endswith("idle")]

    stack, reference = twins(Idle, memory=memory)
    agree(stack, reference, scenario)
    assert all((p.grad is None) == name.endswith("idle") for name, p in stack.named_parameters())


@every_memory
def test_autograd_grad_returns_the_gradients_and_touches_no_grad(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        parameters = list(model.parameters())
        some = [parameters[i] for i in (0, 5, len(parameters) - 1)]
        found = []
        for inputs in (parameters, [x], [shift], some, [x, shift, *parameters]):
            y = model(x, shift=shift)
            found += torch.autograd.grad(loss_of(y), inputs)
        return found, x.grad, shift.grad

    stack, reference = twins(memory=memory)
    agree(stack, reference, scenario)
    assert all(p.grad is None for p in stack.parameters())


@every_memory
def test_backward_with_inputs_fills_those_and_no_others(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        parameters = list(model.parameters())
        loss_of(model(x, shift=shift)).backward(inputs=[parameters[2], parameters[9]])
        loss_of(model(x, shift=shift)).backward(inputs=[shift])
        return x.grad, shift.grad

    stack, reference = twins(memory=memory)
    agree(stack, reference, scenario)
    assert sum(p.grad is not None for p in stack.parameters()) == 2


@every_memory
@pytest.mark.parametrize("stream", [0, 1])
def test_a_loss_on_one_stream_alone_gives_its_gradients(memory: str, stream: int) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        streams = model(x)
        loss_of(streams[stream]).backward()
        return x.grad

    agree(*twins(memory=memory, merge=None), scenario)


@every_memory
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("final", ["kept", "dropped"])
def test_a_loss_on_a_hidden_state_alone_gives_its_gradients(memory: str, block: int, final: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        result = model.run(x, hidden=[block])
        a, b = result.hidden[block]
        if final == "dropped":
            del result
        loss_of(a + 2 * b).backward()
        return a, b, x.grad

    agree(*twins(depth=4, memory=memory), scenario)


@every_memory
def test_losses_on_all_hidden_states_and_the_output_together_give_their_gradients(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        result = model.run(x, hidden=[0, 1, 2, 3])
        loss = loss_of(result[0] - result[1])
        for a, b in result.hidden.values():
            loss = loss + loss_of(a * 3 + b)
        loss.backward()
        return x.grad

    agree(*twins(Noisy, depth=4, memory=memory), scenario)


@every_memory
def test_a_gradient_penalty_is_differentiated_twice(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        y = model(x, shift=shift)
        first = torch.autograd.grad(loss_of(y), [x, shift, *model.parameters()], create_graph=True)
        penalty = sum(g.pow(3).sum() for g in first)
        (penalty + loss_of(y)).backward()
        return first, x.grad, shift.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_a_third_derivative_is_right(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(2, 6)
        value = loss_of(model(x))
        found = []
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(slope)
            value = slope.pow(2).sum()
        value.backward()
        return found, x.grad

    agree(*twins(depth=2, memory=memory), scenario)


@every_memory
def test_partial_backwards_after_one_another_walk_the_nodes_that_are_left(memory: str) -> None:
    """Without retain_graph: the second one needs only what the first one did not walk."""

    def scenario(model: Any) -> Any:
        x = sample(4, 6, grad=False)
        f, g = (m for i, m in enumerate(m for m in model.modules() if isinstance(m, Mlp)) if i in (4, 5))
        a, b = model(x)
        first = torch.autograd.grad(a.sin().sum(), list(f.parameters()))
        second = torch.autograd.grad(b.sin().sum(), list(g.parameters()))
        return first, second

    agree(*twins(memory=memory, merge=None), scenario)


class WithLoss(Noisy):
    """Returns an auxiliary loss that hangs on parameters, and on the stream only when it is `connected`."""

    connected = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.outer((self.inner(x if self.connected else x.detach())).cos()).pow(2).mean()


class WithLossApart(WithLoss):
    connected = False


@every_memory
@pytest.mark.parametrize("branch", [WithLoss, WithLossApart])
@pytest.mark.parametrize("weights", [(1, 1), (0, 1), (1, 0)])
def test_auxiliary_losses_of_branches_have_their_gradients(memory: str, branch: Any, weights: tuple[int, int]) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y, aux = model(x)
        (weights[0] * loss_of(y) + weights[1] * aux).backward()
        return y, aux, x.grad

    agree(*twins(branch, memory=memory, aux=("f", "g")), scenario)


@every_memory
def test_an_auxiliary_loss_may_be_differentiated_before_the_output(memory: str) -> None:
    """The loss hangs on parameters alone, so its backward leaves the rest of the graph whole."""

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y, aux = model(x)
        aux.backward()
        loss_of(y).backward()
        return x.grad

    agree(*twins(WithLossApart, memory=memory, aux=("f", "g")), scenario)


@every_memory
def test_one_of_two_branches_may_return_an_auxiliary_loss(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y, aux = model(x)
        (loss_of(y) + 3 * aux).backward()
        return y, aux, x.grad

    torch.manual_seed(0)
    agree(*twins_of([(WithLoss(), Mlp()) for _ in range(3)], memory, aux="f"), scenario)


@every_memory
def test_tensors_that_branches_close_over_get_their_gradients(memory: str) -> None:
    found = []
    for build in ("retrograde", "plain"):
        x, w, v = sample(4, 6), sample(6, 6, seed=2), sample(6, seed=3)
        pair = (lambda s, w=w: torch.tanh(s @ w), lambda s, v=v, w=w: (s * v).sin() @ w)
        if build == "retrograde":
            y = rg.ReversibleSequence([rg.two_stream(*pair)] * 3, memory=memory_of(memory, 3))(x)
        else:
            a, b = plain([pair] * 3, x)
            y = (a + b) / 2
        loss_of(y).backward()
        found.append((y, x.grad, w.grad, v.grad))
    all_close(*found)


@every_memory
@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (2, 3, 6), (6,)])
def test_any_batch_shape_and_an_empty_batch_work(memory: str, shape: tuple[int, ...]) -> None:
    def scenario(model: Any) -> Any:
        x = sample(*shape)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(memory=memory), scenario)


@every_memory
def test_strided_and_expanded_inputs_get_their_gradients(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, z = sample(6, 4), sample(6, seed=4)
        y = model((x.t(), z.expand(4, 6)))
        loss_of(y).backward()
        return y, x.grad, z.grad

    agree(*twins(memory=memory), scenario)
