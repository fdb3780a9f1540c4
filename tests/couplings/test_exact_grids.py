"""Grids that change, that are inside of one another, and zeros of both signs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.conversion._bdia import SignedHalf


def test_the_range_of_a_stack_inside_a_branch_does_not_rescale_the_outer_one() -> None:
    inner = rg.ReversibleSequence([rg.two_stream(nn.Tanh(), nn.Tanh())], exact=True, grid_bits=20)
    outer = rg.ReversibleSequence([rg.two_stream(lambda s: inner(100 * s), nn.Tanh())], exact=True, overflow="rescale")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # or it goes on for ever
        with pytest.raises(ValueError, match="bits=17 would hold it"):
            outer(torch.ones(2, 6))


class Signs(nn.Module):
    """A branch of BDIA that sees the sign of a zero, and whose updates are zeros of both signs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sign = torch.randint(0, 2, (len(x), 1)) * 2.0 - 1
        return sign, -self.inner(x).relu() * torch.copysign(torch.ones_like(x), x)


def test_bdia_recomputes_zeros_with_their_signs() -> None:
    torch.manual_seed(0)
    blocks = [rg.Block(rg.Step(Signs(), 0, (1,), coupling=SignedHalf(4)), order=(1, 0)) for _ in range(8)]
    stack = rg.ReversibleSequence(blocks)
    x = torch.randn(64, 6).round() / 4
    found = []
    for memory in ("store", "reverse"):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(stack(x, memory=memory).sin().sum(), list(stack.parameters())))
    assert all(map(torch.equal, *found))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.parametrize("memory", ["reverse", "selective", "checkpoint"])
@pytest.mark.parametrize("change", ["a call that rescales", "other bits", "exact = False"])
@pytest.mark.filterwarnings("ignore:.*The stack continues with a grid")
def test_a_grid_that_changes_between_forward_and_backward_changes_no_bit(memory: str, change: str) -> None:
    found = []
    for each in ("store", memory):
        torch.manual_seed(0)
        blocks = [rg.two_stream(mlp(), mlp()) for _ in range(3)]
        stack = rg.ReversibleSequence(blocks, exact=True, grid_bits=20, overflow="rescale", memory=each)
        x = torch.randn(5, 6)
        loss = stack(x).sin().sum()
        if change == "a call that rescales":
            stack(1000 * x)
        elif change == "other bits":
            stack.grid_bits = 8
        else:
            stack.exact = False
        found.append(torch.autograd.grad(loss, list(stack.parameters())))
    assert all(map(torch.equal, *found))
