"""BDIA: one side bit per element makes it exact, and in eval nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrograde import convert
from retrograde.conversion._bdia import SignedHalf
from small_models import Model, assert_same_bits, gradients


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), bits=st.integers(6, 20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_separate_returns_the_bits_that_combine_was_given(seed: int, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    coupling = SignedHalf(bits)
    target = coupling.prepare(torch.randn(4, 37, dtype=dtype).mul_(3))
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype).view(4, 1)
    update = sign, torch.randn(4, 37, dtype=dtype)
    combined = coupling.combine(target, update)
    side_bits = coupling.side_bits(target)
    assert torch.equal(coupling.separate(combined, update, side_bits), target)
    assert side_bits.numel() == -(-target.numel() // 8)
    assert not torch.equal(coupling.separate(combined, update, ~side_bits), target)


def test_the_coupling_halves_on_the_grid_and_passes_half_the_gradient() -> None:
    coupling = SignedHalf(16)
    target = coupling.prepare(torch.randn(2, 1000)).requires_grad_()
    sign = torch.tensor([[1.0], [-1.0]])
    combined = coupling.combine(target, (sign, torch.zeros(2, 1000)))
    torch.testing.assert_close(combined, sign * target / 2, rtol=0, atol=2.0**-17)
    combined.sum().backward()
    assert torch.equal(target.grad, (sign / 2).expand(2, 1000))


def drawn(samples: int) -> Tensor:
    return (torch.randint(0, 2, (samples, 1, 1)) - 0.5).float()


def reference(model: Model, x: Tensor, seed: int) -> Tensor:
    """BDIA as in the paper, without a grid."""
    torch.manual_seed(seed)
    before = model.embed(x)
    now = model.layers[0](before)
    for layer in list(model.layers)[1:]:
        update = layer(now) - now
        gamma = drawn(len(x))
        before, now = now, gamma * before + (1 - gamma) * now + (1 + gamma) * update
    return model.head(now)


def test_training_computes_the_formula_of_the_paper_and_its_gradients() -> None:
    model = Model(depth=5).train()
    x = torch.randn(6, 7, 3)
    expected = reference(model, x, seed=5)
    expected.square().mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    convert(model, "bdia", exact=True, grid_bits=18)
    torch.manual_seed(5)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-4)
    for name, gradient in gradients(model, {"x": x}, seed=5).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


def test_each_sample_and_each_call_draws_its_own_sign() -> None:
    model = Model(depth=5).train()
    x = torch.randn(1, 7, 3).expand(64, 7, 3)
    expected = model(x)
    convert(model, "bdia", exact=True, grid_bits=18)
    with torch.no_grad():
        first, second = model(x), model(x)
        mean = torch.stack([model(x) for _ in range(40)]).mean((0, 1))
    assert len(first[:, 0, 0].unique()) > 8
    assert not torch.equal(first, second)
    spread = (first - expected).norm() / expected.norm()
    off = (mean - expected[0]).norm() / expected[0].norm()
    assert off < 0.3 * spread


@pytest.mark.parametrize("depth", [3, 40])
def test_gradients_are_bit_identical_to_those_of_stored_activations_at_any_depth(depth: int) -> None:
    model = Model(depth, dropout=0.1).train()
    batch: dict[str, Any] = {"x": torch.randn(2, 5, 3)}
    stack = convert(model, "bdia", memory="store").stack
    stored = gradients(model, batch)
    stack.memory = "reverse"
    assert_same_bits(gradients(model, batch), stored)


def test_the_network_is_unchanged_in_eval() -> None:
    model = Model(dropout=0.1).eval()
    x = torch.randn(2, 5, 3)
    expected = model(x)
    conversion = convert(model, "bdia", batch=x)
    assert torch.equal(model(x), expected)
    assert conversion.report is not None
    assert conversion.report.logits_difference == 0
    assert conversion.report.side_bits == 0.75  # one bit in each layer but the first
