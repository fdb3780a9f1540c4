"""`map_gradient_checkpointing`: the methods that trainers call, on a model with its own stacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograde as rg
from architectures import ARCHITECTURES
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


@pytest.mark.parametrize(
    ("memory", "without_inverse"), [("reverse", "checkpoint"), ("selective", "selective checkpoint")]
)
def test_enabling_checkpoints_the_blocks_without_an_inverse(memory: str, without_inverse: str) -> None:
    model = map_gradient_checkpointing(nn.Sequential(staged()))
    model.gradient_checkpointing_disable()
    assert str(model[0].memory) == "blocks 0-4 store"
    expected = gradients(model)
    model.gradient_checkpointing_enable({"memory": memory})
    assert str(model[0].memory) == f"blocks 0-1 {memory}, 2 {without_inverse}, 3-4 {memory}"
    for actual, true in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(actual, true)


@pytest.mark.parametrize(
    ("memory", "without_inverse"), [("reverse", "checkpoint"), ("selective", "selective checkpoint")]
)
def test_every_second_layer_stores(memory: str, without_inverse: str) -> None:
    model = map_gradient_checkpointing(nn.Sequential(staged()))
    model.gradient_checkpointing_enable({"memory": memory}, every_n_layers=2)
    assert str(model[0].memory) == f"blocks 0 {memory}, 1 store, 2 {without_inverse}, 3 store, 4 {memory}"


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


def enabled(model: nn.Module) -> list[str]:
    """The layers whose stock checkpointing is on."""
    return [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]


@pytest.mark.interop
@pytest.mark.parametrize("name", ["bart", "t5", "swin"])
def test_the_methods_reach_every_converted_list(name: str) -> None:
    model, batch = ARCHITECTURES[name].make()
    model.train()
    stacks = [rg.convert(model, "bdia", layers=layers).stack for layers in ARCHITECTURES[name].layers]
    assert len(stacks) == 2
    model.gradient_checkpointing_disable()
    assert [{*stack.memory.memory} for stack in stacks] == [{"store"}] * 2
    model.gradient_checkpointing_enable({"memory": "checkpoint"})
    assert [{*stack.memory.memory} for stack in stacks] == [{"checkpoint"}] * 2
    converted = {id(original.layer) for stack in stacks for original in stack.originals}
    assert not [n for n in enabled(model) if id(model.get_submodule(n)) in converted]
    assert model(**batch).loss.isfinite()


@pytest.mark.interop
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_lists_that_were_not_converted_keep_their_own_checkpointing(name: str) -> None:
    model, batch = ARCHITECTURES[name].make()
    model.train()
    lists = {"bart": ("model.encoder.layers", "model.decoder.layers"), "t5": ("encoder.block", "decoder.block")}
    encoder, decoder = lists[name]
    model.gradient_checkpointing_enable()
    conversion = rg.convert(model, "bdia", layers=f"{decoder}[1:]", memory="store")
    assert f"{encoder}.0" in enabled(model)
    assert f"{decoder}.1" not in enabled(model)
    model.gradient_checkpointing_disable()
    assert not enabled(model)
    model.gradient_checkpointing_enable({"memory": "checkpoint", "use_reentrant": False})
    layers = [n for n in enabled(model) if n.startswith((encoder, decoder)) and n.rpartition(".")[2].isdigit()]
    assert layers == [f"{encoder}.{i}" for i in range(3)] + [f"{decoder}.0"]
    assert str(conversion.stack.memory) == "blocks 0-1 checkpoint"
    model(**batch).loss.backward()
    conversion.undo()
    assert f"{decoder}.1" in enabled(model)
    model.gradient_checkpointing_disable()
    assert not enabled(model)
