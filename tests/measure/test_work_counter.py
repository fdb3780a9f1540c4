"""Work is counted, and the same run always has the same amount."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from retrograde.measure.work_counter import WorkCounter


def counted(model: nn.Module, x: torch.Tensor) -> WorkCounter:
    with WorkCounter() as counter:
        model(x)
    return counter


def test_random_numbers_are_work_of_their_own() -> None:
    """On a CPU, to draw a number takes longer than to read and write it: dropout is not as cheap as its bytes."""
    x = torch.randn(64, 64)
    drawn, none = counted(nn.Dropout(0.1), x), counted(nn.Dropout(0.1).eval(), x)
    assert (drawn.draws, none.draws) == (x.numel(), 0)
    assert drawn.draws * 4e-9 > drawn.bytes / 1e10
    assert counted(nn.Dropout(0.1), x).seconds == drawn.seconds


def test_attention_counts_its_arithmetic_and_no_draws() -> None:
    """torch marks its operators as random because they can drop out."""
    q = torch.randn(1, 2, 16, 8)
    with WorkCounter() as counter:
        functional.scaled_dot_product_attention(q, q, q)
        forward = counter.operations
        functional.scaled_dot_product_attention(q.requires_grad_(), q, q).sum().backward()
    assert counter.draws == 0
    assert forward == 2 * 2 * 2 * 16 * 16 * 8
    assert counter.operations == 2 * forward + 5 * forward // 2  # five products backward, two forward
