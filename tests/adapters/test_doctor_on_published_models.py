"""The doctor sees by itself what is hard in published models."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
import torch

from models import lie, reformer_lm, routing_lm
from published import Twins
from retrograde.diagnose import examine

pytestmark = pytest.mark.interop

Load = Callable[[str], Twins]


def tokens(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(0))


def molecule() -> dict[str, torch.Tensor]:
    coordinates = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    return {"feats": tokens(10, 2, 8), "coors": coordinates, "mask": torch.ones(2, 8).bool()}


def test_the_streams_of_the_lie_transformer_grow_and_drift_at_depth_twelve(twins: Load) -> None:
    model = lie(twins("lie_transformer_pytorch").ours, depth=12)
    diagnosis = examine(model, molecule())
    (stack,) = diagnosis.stacks
    assert not diagnosis.healthy
    assert stack.gradient_error > 0.1
    assert stack.first_bad is not None
    assert "the streams grow" in diagnosis.verdict
    sizes = [block.magnitude for block in stack.blocks if block.magnitude is not None]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1000 * sizes[0]
    assert all(b.amplification is not None and b.amplification > 3 for b in stack.blocks[:-1])
    (anchors,) = [s for s in diagnosis.suggestions if s.remedy.startswith("Anchors")]
    assert anchors.enough
    assert anchors.after.gradient_error < 1e-3 < anchors.before.gradient_error


def test_a_shallow_lie_transformer_is_healthy(twins: Load) -> None:
    """So that the test above is known to see depth, and not the model."""
    model = lie(twins("lie_transformer_pytorch").ours, depth=2)
    assert examine(model, molecule()).healthy


def test_the_buffers_of_the_routing_transformers_k_means_are_named(twins: Load) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        model = routing_lm(twins("routing_transformer").ours)
    diagnosis = examine(model, tokens(64, 2, 64))
    attention, feed_forward = diagnosis.stacks[0].blocks[0].steps
    assert any(name.endswith("kmeans.means") for name in attention.behaviour.buffers)
    assert any(name.endswith("kmeans.initted") for name in attention.behaviour.buffers)
    assert not feed_forward.behaviour.buffers
    assert attention.decisions > 0
    assert "kmeans.means" in diagnosis.table()


def test_the_reformers_hidden_state_and_choices_are_seen(twins: Load) -> None:
    model = reformer_lm(twins("reformer_pytorch").ours, dropout=0.1)
    diagnosis = examine(model, tokens(64, 2, 64))
    assert diagnosis.healthy
    attention = diagnosis.stacks[0].blocks[0].steps[0]
    assert any(name.endswith("_cache") for name in attention.behaviour.attributes)
    assert attention.behaviour.draws
    assert attention.decisions > 0
