"""torch.compile: branches compiled one by one, and a model compiled around a stack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def branch(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.stack = rg.ReversibleSequence([rg.two_stream(branch(dropout), branch(dropout)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.stack(self.enter(x))
        assert isinstance(y, Tensor)
        return y.sin()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_branches_are_right_at_every_length() -> None:
    """The published modules die of donated buffers from the second length on."""
    torch.manual_seed(0)
    shared = branch()
    eager = rg.ReversibleSequence([rg.two_stream(shared, shared) for _ in range(3)])
    compiled = torch.compile(shared)
    stack = rg.ReversibleSequence([rg.two_stream(compiled, compiled) for _ in range(3)])
    for length in (4, 6, 9, 5):
        x = torch.randn(2, length, 8)
        close(gradients(stack, x), gradients(eager, x))


def test_a_compiled_model_around_a_stack_is_right_with_dropout() -> None:
    """The stack itself runs eagerly: its draws are those of the eager model, and so are its gradients."""
    torch.manual_seed(0)
    model = Model(dropout=0.3)
    x = torch.randn(2, 5, 8)
    wanted = gradients(model, x)
    torch._dynamo.reset()
    close(gradients(torch.compile(model), x), wanted)  # type: ignore[arg-type]
