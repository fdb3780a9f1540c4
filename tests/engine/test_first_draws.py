"""A branch that draws random numbers for the first time after many calls: the replay draws the same ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg


class DrawsLater(nn.Module):
    """Scales by a random number from the moment that it is told to, in a way that no attribute shows."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.told: list[bool] = []
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x).tanh()
        return result * (1 + self.draw()) if self.told else result


DRAWS = {
    "one number": lambda: torch.rand((), dtype=torch.float64),
    "as many as bring the generator to the same position": lambda: torch.rand(624).mean().double(),
    "a normal number that was computed with the one before it": lambda: torch.randn(1).double(),
}


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: str) -> list[Tensor]:
    torch.manual_seed(0)
    torch.randn(1)  # the second of this pair of normal numbers waits in the generator
    return list(torch.autograd.grad(stack(x, memory=memory).sin().sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_first_draw_after_many_calls_is_replayed(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(1)
    branches = [DrawsLater(draw) for _ in range(6)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)])
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        gradients(stack, x, "reverse")
    branches[2].told.append(True)
    reverse = gradients(stack, x, "reverse")
    stored = gradients(stack, x, "store")
    for mine, plain in zip(reverse, stored, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)
