"""Branches of one class that differ in what they compute are compiled as what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, WIDTH, ByRule, Mlp, Model, assert_close, gradients

pytestmark = QUIET


class Activated(nn.Module):
    """A layer and an activation, whose class is not seen from outside."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.inner, self.activation = nn.Linear(WIDTH, WIDTH), activation

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.activation(self.inner(x))
        return update


class Power(torch.autograd.Function):
    """x * factor, with a gradient that is not its derivative, so that the backward pass shows the constant too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor * 2, None


class Powered(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = Power.apply(self.inner(x), self.factor)
        return update


class Clamped(nn.Module):
    """Two calls of one operator, one with an argument more."""

    def __init__(self, *limits: float) -> None:
        super().__init__()
        self.inner, self.limits = nn.Linear(WIDTH, WIDTH), limits

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).clamp(*self.limits)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Two layers, which may share a weight."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        if is_tied:
            self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.other(torch.tanh(self.one(x)))
        return update


def hooked() -> nn.Module:
    branch = Mlp()
    branch.inner.register_forward_hook(lambda _, __, out: out * 2 + 1)
    return branch


PAIRS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "the class of a part": lambda: (Activated(nn.Tanh()), Activated(nn.Sigmoid())),
    "a constant of a custom Function": lambda: (Powered(0.5), Powered(-0.25)),
    "a hook on a part": lambda: (Mlp(), hooked()),
    "a weight used twice": lambda: (Twice(is_tied=True), Twice(is_tied=False)),
    "an argument more": lambda: (Clamped(0.0), Clamped(0.0, 0.1)),
}


def check(model: nn.Module, backend: Any, tolerance: float) -> None:
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    wanted = gradients(model, x, leaves)
    assert_close(gradients(torch.compile(model, backend=backend, fullgraph=True), x, leaves), wanted, tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_branches_that_differ_are_not_taken_for_equal(name: str) -> None:
    torch.manual_seed(0)
    check(Model([rg.two_stream(*PAIRS[name]()) for _ in range(2)]).double(), ByRule(), 1e-9)


class CastOnce(nn.Module):
    """Two stacks, the first under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.cast, self.full = (rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp())]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.cast(x)
        z: Tensor = self.full(x)
        return torch.cat([y, z])


def test_the_autocast_of_one_stack_is_not_that_of_another() -> None:
    """The stack without autocast is right to float32, which bfloat16 would miss by far."""
    torch.manual_seed(0)
    model, x = CastOnce(), torch.randn(6, WIDTH)
    compiled = torch.compile(model, backend=ByRule(), fullgraph=True)
    wanted, found = (gradients(run, x, list(model.full.parameters())) for run in (model, compiled))
    assert_close([found[0][len(x) :], *found[1:]], [wanted[0][len(x) :], *wanted[1:]], 1e-5)
    assert_close([found[0], found[0]], [wanted[0], wanted[0]], 2e-2)


@pytest.mark.slow
def test_generated_code_of_branches_that_differ_is_not_shared() -> None:
    torch.manual_seed(0)
    blocks = [rg.two_stream(*make()) for make in PAIRS.values()]
    check(Model(blocks).double(), "retrograde", 1e-9)
