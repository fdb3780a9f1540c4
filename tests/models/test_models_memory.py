"""The memory of models does not grow with depth, and the logits are not its peak."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from problems import nodes_of_a_ring, whole
from retrograde import models
from retrograde.measure import MemoryTracker


class Measured(NamedTuple):
    after_forward: int
    """Live bytes after the forward pass, while the loss is alive."""
    peak: int


def measure(model: nn.Module, loss: Any) -> Measured:
    """Gradients of parameters are dropped as soon as they are complete, as a fused optimiser does."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with MemoryTracker(ignore=[model]) as memory:
        value = loss(model)
        after_forward = memory.live
        value.backward()
    return Measured(after_forward, memory.peak)


def language_model(depth: int, memory: Any, **options: Any) -> Measured:
    model = models.ReversibleLM(20, 16, depth, 2, 1, memory=memory, **options)
    return measure(model, lambda model: model.loss(whole(20, 4, 65)))


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"feed_forward_chunks": 4}], ids=str)
def test_the_memory_of_a_language_model_does_not_grow_with_depth(options: dict[str, Any]) -> None:
    shallow, deep = language_model(4, "reverse", **options), language_model(32, "reverse", **options)
    assert deep == shallow
    stored = [language_model(depth, "store", **options) for depth in (4, 8)]
    assert stored[1].after_forward > 1.6 * stored[0].after_forward
    assert stored[1].peak > 1.4 * stored[0].peak > shallow.peak


def test_a_language_model_with_chunks_has_a_lower_peak() -> None:
    assert language_model(4, "reverse", feed_forward_chunks=8).peak < 0.75 * language_model(4, "reverse").peak


def test_the_logits_of_a_language_model_are_never_alive_all_at_once() -> None:
    vocabulary, tokens = 5000, whole(5000, 2, 129)
    logits = 2 * 128 * vocabulary * 4

    def plain(model: Any) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    model = models.ReversibleLM(vocabulary, 8, 2, 2, loss_chunk=16)
    chunked = measure(model, lambda model: model.loss(tokens))
    assert chunked.peak < 0.5 * logits
    assert measure(model, plain).peak > 2 * logits


def test_a_thousand_layers_of_a_graph_network_hold_no_more_than_fifty() -> None:
    def at(depth: int, memory: str) -> Measured:
        model = models.DeepGraphNetwork(4, 2, width=8, depth=depth, memory=memory)
        return measure(model, nodes_of_a_ring)

    assert at(1000, "reverse") == at(50, "reverse")
    assert at(50, "store").after_forward > 10 * at(50, "reverse").after_forward


def test_a_stage_saves_its_transition_and_nothing_per_block() -> None:
    def at(depth: int, memory: str) -> Measured:
        model = models.RevNet(4, widths=(8, 8), depths=(depth, depth), memory=memory)
        images, classes = torch.randn(4, 3, 16, 16), whole(4, 4)
        return measure(model, lambda model: F.cross_entropy(model(images), classes))

    copies = at(12, "reverse").after_forward - at(3, "reverse").after_forward  # of batch statistics, for the replay
    assert copies < 0.05 * at(3, "reverse").after_forward
    assert at(12, "store").after_forward > 2 * at(3, "store").after_forward > 3 * at(3, "reverse").after_forward


@pytest.mark.parametrize("kind", ["RevCol", "RevBiFPN"])
def test_columns_and_pyramids_hold_nothing_per_block(kind: str) -> None:
    def at(depth: int, memory: str) -> Measured:
        make: Any = models.RevCol if kind == "RevCol" else models.RevBiFPN
        model = make(4, (8, 8, 8), depth, memory=memory)
        images, classes = torch.randn(4, 3, 16, 16), whole(4, 4)
        return measure(model, lambda model: F.cross_entropy(model(images), classes))

    shallow, deep = at(2, "reverse"), at(8, "reverse")
    assert deep.after_forward < 1.1 * shallow.after_forward  # copies of batch statistics
    assert deep.peak < 1.1 * shallow.peak
    assert at(8, "store").peak > 3 * deep.peak
