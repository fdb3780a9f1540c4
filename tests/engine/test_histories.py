"""What users do with a stack, in any order and with every mixture of memory modes: plain autograd gives the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import retrograde as rg
from stacks import Mlp, Noisy, agree, loss_of, sample, twins

MODES = ("reverse", "selective", "checkpoint", "offload", "store")
DEPTH = 4

Event = Callable[[nn.Module, random.Random], None]


class Halved(nn.Module):
    """A parametrization that can be taken away again."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


class Normal(nn.Module):
    """Batch statistics and a weight whose spectral norm is estimated: buffers that change in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.spectral_norm(nn.Linear(6, 6, bias=False).double())
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inner(x)))


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def freeze_or_thaw(model: nn.Module, chance: random.Random) -> None:
    parameter = chance.choice(list(model.parameters()))
    parameter.requires_grad_(not parameter.requires_grad)


def turn_a_part(model: nn.Module, chance: random.Random) -> None:
    part = chance.choice([m for m in model.modules() if isinstance(m, (Mlp, Normal, nn.Dropout))])
    part.train(not part.training)


def exchange_a_layer(model: nn.Module, chance: random.Random) -> None:
    chance.choice([m for m in model.modules() if isinstance(m, Mlp)]).outer = nn.Linear(7, 6).double()


def load_other_tensors(model: nn.Module, chance: random.Random) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def go_through_float32(model: nn.Module, chance: random.Random) -> None:
    model.float().double()


def parametrize_a_layer(model: nn.Module, chance: random.Random) -> None:
    parametrize.register_parametrization(chance.choice(linears(model)), "weight", Halved())


def take_a_parametrization_away(model: nn.Module, chance: random.Random) -> None:
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight") and isinstance(module.parametrizations.weight[0], Halved):
            parametrize.remove_parametrizations(module, "weight")
            return


def hook_a_layer(model: nn.Module, chance: random.Random) -> None:
    chance.choice(linears(model)).register_full_backward_hook(
        lambda module, to, come: tuple(1.5 * g for g in to if g is not None)
    )


def fail_inside_a_branch(model: nn.Module, chance: random.Random) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a failure that the user goes on after")

    handle = chance.choice(linears(model)).register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(sample(4, 6))
    handle.remove()


def step(model: nn.Module, chance: random.Random) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)


EVENTS: list[Event] = [
    freeze_or_thaw,
    turn_a_part,
    exchange_a_layer,
    load_other_tensors,
    go_through_float32,
    parametrize_a_layer,
    take_a_parametrization_away,
    hook_a_layer,
    fail_inside_a_branch,
    step,
]


def go_backward(loss: Tensor, x: Tensor, chance: random.Random) -> None:
    """Any of the ways in which a graph is walked."""
    way = chance.choice(["once", "twice", "input first", "without grad mode"])
    if way == "twice":
        loss.backward(retain_graph=True)
    elif way == "input first":
        (x.grad,) = torch.autograd.grad(loss, [x], retain_graph=True)
    with torch.set_grad_enabled(way != "without grad mode"):
        loss.backward()


def mixture(chance: random.Random) -> rg.Plan:
    anchors = {chance.randrange(DEPTH) for _ in range(chance.randrange(3))}
    return rg.Plan([chance.choice(MODES) for _ in range(DEPTH)], anchors=anchors)


def branch_kinds(seed: int) -> Callable[[], nn.Module]:
    chance = random.Random(seed)
    return lambda: chance.choice([Mlp, Noisy, Normal])()


@pytest.mark.parametrize("seed", range(12))
def test_a_history_of_changes_leaves_the_gradients_of_plain_autograd(seed: int) -> None:
    stack, reference = twins(branch_kinds(seed), depth=DEPTH)
    for block in stack.blocks:
        block.steps[1].keeps = "products"

    def scenario(model: Any) -> list[Tensor]:
        chance, plans, seen = random.Random(seed), random.Random(seed), []
        for call in range(6):
            if model is stack:
                stack.memory = mixture(plans)
            for event in chance.sample(EVENTS, 2) if call else []:
                event(model, chance)
            x = sample(4 + call % 2, 6, seed=call)
            y = model(x)
            go_backward(loss_of(y), x, chance)
            seen += [y, x.grad]
        return seen

    agree(stack, reference, scenario)


@pytest.mark.parametrize("seed", range(8))
def test_mixtures_of_modes_with_hidden_states_layer_drop_and_a_guard_are_those_of_stored_activations(seed: int) -> None:
    guard = rg.Guard(every=1, tolerance=1e-9, action="raise")
    torch.manual_seed(seed)
    blocks = [rg.two_stream(Noisy(), Noisy(), save_ops="products") for _ in range(DEPTH)]
    stack = rg.ReversibleSequence(blocks, layer_drop=0.3, guard=guard)

    def scenario(memory: Callable[[random.Random], Any]) -> Callable[[Any], list[Tensor]]:
        def run(model: Any) -> list[Tensor]:
            chance, seen = random.Random(seed), []
            model.zero_grad()
            for call in range(3):
                x = sample(4, 6, seed=call)
                outputs = model.run(x, memory=memory(chance), hidden=[0, 2])
                ends = [*outputs, *(stream for state in outputs.hidden.values() for stream in state)]
                loss = torch.stack([loss_of(stream) for stream in ends]).sum()
                go_backward(loss, x, random.Random(seed + call))
                seen += [*outputs, x.grad]
            return [*seen, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        return run

    stored = scenario(lambda _: "store")
    agree_twice(stack, scenario(mixture), stored)


def agree_twice(stack: nn.Module, scenario: Callable[[Any], Any], stored: Callable[[Any], Any]) -> None:
    """The same stack gives the same by both scenarios, and leaves the generators alike."""
    results = []
    for run in (scenario, stored):
        torch.manual_seed(3)
        results.append([*run(stack), torch.get_rng_state().double()])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", MODES[:-1])
def test_complex_streams_get_the_gradients_of_plain_autograd(memory: str) -> None:
    stack, reference = twins(lambda: nn.Linear(6, 6, dtype=torch.complex128), memory=memory)

    def scenario(model: Any) -> list[Tensor]:
        parts = sample(4, 6, 2)
        y = model(torch.view_as_complex(parts))
        y.abs().square().sum().backward()
        return [torch.view_as_real(y), parts.grad, *(torch.view_as_real(p.grad) for p in model.parameters())]

    for got, expected in zip(scenario(stack), scenario(reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"guard": rg.Guard(every=1)}, {"max_drift": 1e-3}])
@pytest.mark.parametrize("memory", MODES[:-1])
def test_a_batch_without_entries_gives_gradients_of_zero(memory: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(3)], memory=memory, **options)
    x = sample(0, 6)
    stack(x).sum().backward()
    assert x.grad.shape == (0, 6)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in stack.parameters())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("memory", MODES[:-1])
def test_recurrent_branches_get_the_gradients_of_plain_autograd(memory: str, kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = kind(6, 6, batch_first=True).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.over(x)[0]

    def scenario(model: Any) -> list[Tensor]:
        x = sample(2, 3, 6)
        y = model(x)
        loss_of(y).backward()
        return [y, x.grad]

    agree(*twins(Recurrent, memory=memory), scenario)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.parametrize("memory", MODES[:-1])
def test_a_branch_may_map_and_push_forward(memory: str, transform: str) -> None:
    class Transformed(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            run = super().forward
            return torch.func.vmap(run)(x) if transform == "vmap" else torch.func.jvp(run, (x,), (x.sin(),))[1]

    def scenario(model: Any) -> list[Tensor]:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward()
        return [y, x.grad]

    agree(*twins(Transformed, memory=memory), scenario)


class Labelled(Tensor):
    """A tensor with a class of its own, as metadata or units have."""


@pytest.mark.parametrize("memory", MODES[:-1])
def test_a_subclass_of_tensor_comes_out_with_its_gradients(memory: str) -> None:
    stack, reference = twins(memory=memory)
    results = []
    for model in (stack, reference):
        x = sample(4, 6, grad=False).as_subclass(Labelled).requires_grad_()
        y = model(x)
        assert type(y) is Labelled
        loss_of(y).backward()
        results.append([x.grad.as_subclass(Tensor), *(p.grad.as_subclass(Tensor) for p in model.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
