"""What docs/compile.md says compiles, with generated code, in float64 against the eager model: `make test-compiled`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, WIDTH, Mlp, Model, assert_close, gradients
from test_backend_inductor import slope_error

pytestmark = [QUIET, pytest.mark.slow]


def pairs(depth: int = 2, dropout: float = 0.0) -> list[rg.Block]:
    return [rg.two_stream(Mlp(dropout), Mlp(dropout)) for _ in range(depth)]


class Masked(nn.Module):
    """Reads a buffer that is not saved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.inner(x) * self.mask.sin()  # a value of its own, so that the buffer may be edited
        return update


class Counting(Masked):
    """Edits that buffer, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        update = super().forward(x)
        self.mask += 0.25
        return update


class Choosing(nn.Module):
    """Takes one of two layers by a value, with torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = torch.cond(x.sum() > 0, self.one, self.other, (x,))
        return update


ROWS: dict[str, Callable[[], nn.Module]] = {
    "a stack of one block inside a branch": lambda: Model(
        [rg.two_stream(rg.ReversibleSequence(pairs(1)), Mlp()) for _ in range(2)]
    ),
    "torch.cond in a branch": lambda: Model([rg.two_stream(Choosing(), Mlp()) for _ in range(2)]),
    "a buffer that is not saved": lambda: Model([rg.two_stream(Masked(), Mlp()) for _ in range(2)]),
    "a buffer that is edited": lambda: Model([rg.two_stream(Counting(), Mlp()) for _ in range(2)]),
    "a buffer that is edited in eval": lambda: Model([rg.two_stream(Counting(), Mlp()) for _ in range(2)]).eval(),
    "stored blocks, then reversed ones": lambda: Model(pairs(4), memory=rg.Plan(["store", "reverse"] * 2)),
    "checkpoint": lambda: Model(pairs(), memory="checkpoint"),
}


def restart(model: nn.Module, buffers: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_gradients_of_the_eager_model(name: str) -> None:
    torch.manual_seed(0)
    model, x = ROWS[name]().double(), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves, before = [x, *model.parameters()], [b.clone() for b in model.buffers()]
    wanted, after = gradients(model, x, leaves), [b.clone() for b in model.buffers()]
    restart(model, before)
    assert_close(gradients(torch.compile(model, backend="retrograde"), x, leaves), wanted, 1e-9)
    for found, expected in zip(model.buffers(), after, strict=True):
        torch.testing.assert_close(found, expected)  # edited once


def mixed(dropout: float) -> Model:
    model = Model(pairs(3, dropout), memory=rg.Plan(["store", "reverse", "reverse"]))
    model.enter = nn.Sequential(model.enter, nn.Dropout(dropout))  # type: ignore[assignment]
    return model


DRAWS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dynamic=True": (lambda: Model(pairs(2, 0.3)), {"dynamic": True}),
    "a stored block between dropout and a reversed one": (lambda: mixed(0.3), {}),
    "layer_drop": (lambda: Model(pairs(3), layer_drop=0.5), {}),
    "layer_drop and dropout": (lambda: Model(pairs(3, 0.3), layer_drop=0.5), {}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_that_draws_has_the_gradients_of_a_finite_difference(name: str) -> None:
    make, options = DRAWS[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, backend="retrograde", fullgraph=True, **options)

    def loss() -> Tensor:
        torch.manual_seed(3)
        y = compiled(x)
        return (y.sin() * y).sum()

    assert slope_error(loss, [x, *model.parameters()]) < 1e-6


def test_a_retained_graph_is_walked_twice_after_an_ordinary_backward_pass() -> None:
    torch.manual_seed(0)
    model, x = Model(pairs()).double(), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, backend="retrograde", fullgraph=True)
    (wanted,) = torch.autograd.grad(compiled(x).sum(), [x])
    loss = compiled(x).sum()
    for is_kept in (True, False):
        (found,) = torch.autograd.grad(loss, [x], retain_graph=is_kept)
        assert torch.equal(found, wanted)
