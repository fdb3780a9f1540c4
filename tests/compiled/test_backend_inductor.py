"""backend="retrograde" with generated code: random numbers, exact bits, and the name by which it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor

import retrograde as rg
from compiling import QUIET, WIDTH, Attention, Mlp, Model, assert_close, gradients

pytestmark = [QUIET, pytest.mark.slow]


def slope_error(loss: Callable[[], Tensor], leaves: Sequence[Tensor]) -> float:
    """How far the gradients are from a finite difference along a random direction, relatively."""
    grads = torch.autograd.grad(loss(), leaves)
    torch.manual_seed(9)
    directions = [torch.randn_like(leaf) for leaf in leaves]
    expected = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    values = []
    for step in (1e-6, -2e-6, 1e-6):
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf += step * direction
        values.append(loss().detach())
    return float(((values[0] - values[1]) / 2e-6 - expected).abs() / expected.abs())


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_dropout_has_the_gradients_of_a_finite_difference_at_every_budget(budget: float) -> None:
    """torch's own budget of 0.0 draws other masks when it recomputes: see the documentation."""
    torch.manual_seed(0)
    model = Model([rg.two_stream(Mlp(0.3), Mlp(0.3)) for _ in range(3)]).double()
    model.leave = torch.nn.Sequential(torch.nn.Dropout(0.3), model.leave)  # type: ignore[assignment]
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, backend="retrograde", fullgraph=True)

    def loss() -> Tensor:
        torch.manual_seed(3)
        y = compiled(x)
        return (y.sin() * y).sum()

    with functorch_config.patch(activation_memory_budget=budget):
        assert slope_error(loss, [x, *model.parameters()]) < 1e-6


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_attention_has_the_gradients_of_eager_at_every_budget(budget: float) -> None:
    torch.manual_seed(0)
    model = Model([rg.two_stream(Attention(), Mlp()) for _ in range(2)], memory="store").double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    compiled = torch.compile(model, backend="retrograde", fullgraph=True)
    with functorch_config.patch(activation_memory_budget=budget):
        assert_close(gradients(compiled, x, leaves), gradients(model, x, leaves), 1e-12)


def test_exact_gradients_are_bit_identical_to_stored_ones_and_close_to_eager_ones() -> None:
    torch.manual_seed(0)
    model = Model([rg.two_stream(Mlp(), Mlp()) for _ in range(3)], exact=True)
    x = torch.randn(6, WIDTH, requires_grad=True)
    leaves = [x, *model.parameters()]
    compiled = torch.compile(model, backend="retrograde", fullgraph=True)
    reverse = gradients(compiled, x, leaves)
    assert_close(reverse, gradients(model, x, leaves), 1e-3)  # roundings to the grid may differ
    model.stack.memory = "store"
    for found, stored in zip(reverse, gradients(compiled, x, leaves), strict=True):
        assert torch.equal(found, stored)


def test_regions_return_no_memory_that_is_overwritten() -> None:
    """Also outside of stacks. With backend="inductor", torch 2.13 overwrites what the second region saved, and a
    gradient that is still needed (see NOTE [Aliases of a region])."""
    torch.manual_seed(0)
    first, second = Mlp().double(), Mlp().double()

    def half(branch: Mlp, x: Tensor) -> Tensor:
        return branch(x, factor=0.5)

    region = torch.compiler.nested_compile_region(half)

    def run(x: Tensor, call: Callable[..., Tensor] = region) -> Tensor:
        a = x + call(first, x)
        return a * (x + call(second, a))

    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *first.parameters(), *second.parameters()]
    wanted = gradients(lambda x: run(x, half), x, leaves)
    assert_close(gradients(torch.compile(run, backend="retrograde", fullgraph=True), x, leaves), wanted, 1e-12)
