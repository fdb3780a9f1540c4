"""Drift: a + b - b is not a. What a plan can do about it."""

from __future__ import annotations

import torch
from torch import nn

import retrograde as rg

DEPTH = 24


def gradient_error(memory: rg.Plan | str) -> float:
    """The relative error of all gradients in bfloat16 streams, against stored activations of the same arithmetic."""
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).bfloat16() for _ in range(2 * DEPTH)]
    blocks = [rg.two_stream(branches[2 * i], branches[2 * i + 1]) for i in range(DEPTH)]
    stack = rg.ReversibleSequence(blocks, memory=memory)  # type: ignore[arg-type]
    x = torch.randn(8, 16).bfloat16()
    found = torch.autograd.grad(stack(x).float().square().mean(), list(stack.parameters()))
    wanted = torch.autograd.grad(stack(x, memory="store").float().square().mean(), list(stack.parameters()))
    difference = torch.cat([(a.float() - b.float()).flatten() for a, b in zip(found, wanted, strict=True)])
    return float(difference.norm() / torch.cat([b.float().flatten() for b in wanted]).norm())


def test_anchors_bound_the_drift_of_low_precision_streams() -> None:
    free = gradient_error("reverse")
    anchored = gradient_error(rg.Plan(("reverse",) * DEPTH, anchors=frozenset(range(2, DEPTH, 2))))
    assert free > 0, "bfloat16 streams must drift, or this test sees nothing"
    assert anchored < free / 2
    assert gradient_error("checkpoint") == 0
