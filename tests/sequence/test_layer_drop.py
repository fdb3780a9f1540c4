"""Layer drop: blocks left out of a call in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg


def make(layer_drop: float | list[float], depth: int = 6, memory: str = "reverse") -> rg.ReversibleSequence:
    torch.manual_seed(0)
    blocks = [rg.two_stream(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))) for _ in range(depth)]
    return rg.ReversibleSequence(blocks, layer_drop=layer_drop, memory=memory).double()  # type: ignore[arg-type]


def by_hand(stack: rg.ReversibleSequence, x: Tensor, probability: float) -> Tensor:
    """The published way: the draw comes before any of the branches' own."""
    dropped = torch.empty(len(stack.blocks)).uniform_(0, 1) < probability
    kept = [b for b, drop in zip(stack.blocks, dropped, strict=True) if not drop] or list(stack.blocks)[:1]
    first = second = x
    for block in kept:
        first = first + block.steps[0].branch(second)
        second = second + block.steps[1].branch(first)
    return (first + second) / 2


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse"])
def test_a_seed_reproduces_which_blocks_are_dropped_and_the_gradients(memory: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    for seed in range(8):
        stack = make(0.5, memory=memory)
        torch.manual_seed(seed)
        expected = by_hand(stack, x, 0.5)
        expected.square().sum().backward()
        wanted = [None if p.grad is None else p.grad.clone() for p in stack.parameters()]
        stack.zero_grad()
        torch.manual_seed(seed)
        output = stack(x)
        output.square().sum().backward()
        assert torch.equal(output, expected)
        for parameter, grad in zip(stack.parameters(), wanted, strict=True):
            if grad is None:
                assert parameter.grad is None, "a dropped block got a gradient"
            else:
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-14)


def test_the_first_block_is_kept_if_all_would_drop() -> None:
    stack = make(1.0)
    stack(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert [p.grad is not None for p in stack.blocks[0].parameters()] == [True] * 4
    assert all(p.grad is None for block in list(stack.blocks)[1:] for p in block.parameters())


def test_each_block_has_its_own_probability() -> None:
    stack = make([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    stack(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert [next(b.parameters()).grad is not None for b in stack.blocks] == [True, False] * 3


def test_nothing_is_dropped_in_eval() -> None:
    stack = make(0.9).eval()
    x = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(stack(x), make(0.0).eval()(x))


@pytest.mark.parametrize("bad", [1.5, -0.1, [0.1, 0.2]])
def test_a_bad_probability_is_rejected(bad: float | list[float]) -> None:
    with pytest.raises(ValueError, match="layer_drop"):
        make(bad)
