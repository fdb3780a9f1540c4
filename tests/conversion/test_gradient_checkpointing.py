"""`map_gradient_checkpointing`: the methods that trainers call, on a model with its own stacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.conversion import map_gradient_checkpointing


def branch(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def staged() -> rg.ReversibleSequence:
    """Two stages with a transition, which has no inverse, between them."""
    torch.manual_seed(0)
    stages = [[rg.two_stream(branch(width), branch(width)) for _ in range(2)] for width in (8, 4)]
    return rg.ReversibleSequence([*stages[0], rg.transition(nn.Linear(8, 4), nn.Linear(8, 4)), *stages[1]])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(3, 8)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("memory", ["reverse", "selective"])
def test_enabling_checkpoints_the_blocks_without_an_inverse(memory: str) -> None:
    model = map_gradient_checkpointing(nn.Sequential(staged()))
    model.gradient_checkpointing_disable()
    assert str(model[0].memory) == "blocks 0-4 store"
    expected = gradients(model)
    model.gradient_checkpointing_enable({"memory": memory})
    assert str(model[0].memory) == f"blocks 0-1 {memory}, 2 checkpoint, 3-4 {memory}"
    for actual, true in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(actual, true)


@pytest.mark.parametrize("memory", ["reverse", "selective"])
def test_every_second_layer_stores(memory: str) -> None:
    model = map_gradient_checkpointing(nn.Sequential(staged()))
    model.gradient_checkpointing_enable({"memory": memory}, every_n_layers=2)
    assert str(model[0].memory) == f"blocks 0 {memory}, 1 store, 2 checkpoint, 3 store, 4 {memory}"


def test_the_default_mode_is_reverse_and_offload_can_be_chosen() -> None:
    model = map_gradient_checkpointing(staged())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert str(model.memory) == "blocks 0-1 reverse, 2 checkpoint, 3-4 reverse"
    model.gradient_checkpointing_enable(offload=True)
    assert str(model.memory) == "blocks 0-4 offload"


def test_a_plan_can_be_given() -> None:
    model = map_gradient_checkpointing(staged())
    plan = rg.Plan(["reverse"] * 2 + ["store"] * 3, anchors={1})
    model.gradient_checkpointing_enable({"memory": plan})
    assert model.memory == plan


def test_a_model_without_a_stack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear contains no retrograde\.ReversibleSequence"):
        map_gradient_checkpointing(nn.Linear(2, 2))
