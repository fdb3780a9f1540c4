"""`convert` on Hugging Face Transformers models: masks, rotary positions, caches, and extra outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde import convert
from small_models import TRANSFORMERS, assert_same_bits, gpt2, gradients, llama

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.interop
RECIPES = ["bdia", "two_stream", "momentum", "scaled"]


@pytest.fixture(params=TRANSFORMERS, name="make")
def _make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return TRANSFORMERS[request.param]


@pytest.mark.parametrize("recipe", ["bdia", "annealed"])
def test_recipes_that_do_not_change_the_function_give_the_same_logits_in_eval(make: Any, recipe: str) -> None:
    model, batch = make()
    model.eval()
    expected = model(**batch)
    convert(model, recipe)
    output = model(**batch)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_and_stored_activations_give_bit_identical_gradients(make: Any, recipe: str) -> None:
    model, batch = make()
    model.train()
    stack = convert(model, recipe, memory="store").stack
    stored = gradients(model, batch)
    stack.memory = "reverse"
    assert_same_bits(gradients(model, batch), stored)
    assert stored


SUBLAYERS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "GPT2Block": (lambda b, x, **k: b.attn(b.ln_1(x), **k)[0], lambda b, x: b.mlp(b.ln_2(x))),
    "LlamaDecoderLayer": (
        lambda b, x, **k: b.self_attn(b.input_layernorm(x), **k)[0],
        lambda b, x: b.mlp(b.post_attention_layernorm(x)),
    ),
    "BertLayer": (lambda b, x, **k: b.attention(x, **k)[0] - x, lambda b, x: b.output(b.intermediate(x), x) - x),
    "ViTLayer": (
        lambda b, x, **k: b.attention(b.layernorm_before(x), **k)[0],
        lambda b, x: b.mlp(b.layernorm_after(x)),
    ),
}


class ByHand(nn.Module):
    """Replaces the last layer: two streams through all layers, in plain autograd."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.all = layers

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.all[0]
        names = list(type(layer).forward.__code__.co_varnames)[2 : 2 + len(args)]
        given = {**dict(zip(names, args, strict=True)), **kwargs, "past_key_values": None, "use_cache": False}
        attend, feed = SUBLAYERS[type(layer).__name__]
        first = second = x
        for layer in self.all:
            first = first + attend(layer, second, **given)
            second = second + feed(layer, first)
        return (first + second) / 2


def layers_of(model: nn.Module) -> tuple[nn.Module, str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            owner, _, last = name.rpartition(".")
            return model.get_submodule(owner), last
    raise AssertionError("no layers")


def test_two_streams_are_the_attention_and_feed_forward_of_the_model(make: Any) -> None:
    model, batch = make()
    model.double().eval()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    conversion = convert(model, "two_stream", exact=False)
    actual, logits = gradients(model, batch), model(**batch).logits
    assert conversion.stack.parts == "attention and feed-forward"
    conversion.undo()
    owner, name = layers_of(model)
    layers = list(getattr(owner, name))
    setattr(owner, name, nn.ModuleList([ByHand(layers)]))
    expected = model(**batch)
    model.zero_grad(set_to_none=True)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    expected.loss.backward()
    setattr(owner, name, nn.ModuleList(layers))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-10, atol=1e-10)
    for parameter, gradient in actual.items():
        torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("recipe", RECIPES)
def test_masked_tokens_do_not_change_the_logits(recipe: str) -> None:
    for make in (gpt2, llama, TRANSFORMERS["bert"]):
        model, batch = make()
        model.eval()
        convert(model, recipe)
        del batch["labels"]
        shown = model(**batch).logits[0, :7]
        batch["input_ids"] = batch["input_ids"].clone()
        batch["input_ids"][0, 7:] = 5
        torch.testing.assert_close(model(**batch).logits[0, :7], shown, rtol=0, atol=0)
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        if make is TRANSFORMERS["bert"]:  # which is not causal
            assert not torch.allclose(model(**batch).logits[0, :7], shown)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("recipe", RECIPES)
def test_generate_with_its_cache_continues_as_without_one(make: Any, recipe: str) -> None:
    model, batch = make()
    model.eval()
    prompt = {"input_ids": batch["input_ids"][:, :5], "attention_mask": batch["attention_mask"][:, :5]}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**prompt, **options)
    convert(model, recipe)
    cached = model.generate(**prompt, **options, use_cache=True)
    assert cached.shape == (3, 11)
    assert torch.equal(cached, model.generate(**prompt, **options, use_cache=False))
    if recipe == "bdia":
        assert torch.equal(cached, expected)


def test_a_filled_cache_is_refused_if_gradients_are_enabled() -> None:
    model, batch = gpt2()
    model.eval()
    convert(model, "two_stream")
    with torch.no_grad():
        cache = model(batch["input_ids"][:, :5], use_cache=True).past_key_values
    assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="past_key_values holds 5 positions, and gradients are enabled"):
        model(batch["input_ids"][:, 5:], past_key_values=cache)


def test_a_checkpoint_of_a_converted_model_loads_into_the_original_one(make: Any, tmp_path: Path) -> None:
    model, batch = make()
    convert(model, "bdia")
    model.train()
    gradients(model, batch)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    original = type(model).from_pretrained(tmp_path).eval()
    assert not any("retrograde" in name for name in original.state_dict())
    assert torch.equal(original(**batch).logits, model.eval()(**batch).logits)
    convert(original, "bdia")
    assert_same_bits(dict(original.state_dict()), dict(model.state_dict()))


def test_hidden_states_and_attentions_are_unchanged_after_bdia_in_eval() -> None:
    model, batch = gpt2()
    model.set_attn_implementation("eager")
    model.eval()
    wanted = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**batch, **wanted)
    convert(model, "bdia")
    output = model(**batch, **wanted)
    assert len(output.hidden_states) == 5
    assert all(torch.equal(a, b) for a, b in zip(output.hidden_states, expected.hidden_states, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(output.attentions, expected.attentions, strict=True))


def test_states_between_rewired_layers_are_no_numbers_that_look_right() -> None:
    model, batch = gpt2()
    conversion = convert(model, "two_stream")
    output = model(**batch, output_hidden_states=True)
    assert output.logits.isfinite().all()
    for state in output.hidden_states[1:-1]:
        with pytest.raises(RuntimeError, match="do not exist"):
            state.isnan()
    with conversion.original():
        assert all(s.isfinite().all() for s in model(**batch, output_hidden_states=True).hidden_states)


def test_gradient_checkpointing_methods_set_the_memory(make: Any) -> None:
    model, batch = make()
    model.train()
    stack = convert(model, "bdia").stack
    expected = gradients(model, batch)
    modes = []
    for switch in (
        lambda: model.gradient_checkpointing_disable(),
        lambda: model.gradient_checkpointing_enable(),
        lambda: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"memory": "checkpoint"}),
        lambda: model.base_model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda: model.gradient_checkpointing_enable(every_n_layers=2),
    ):
        switch()
        modes.append(str(stack.memory))
        assert not model.is_gradient_checkpointing
        assert_same_bits(gradients(model, batch), expected)
    assert modes[:4] == ["blocks 0-3 store", "blocks 0-3 reverse", "blocks 0-3 checkpoint", "blocks 0-3 reverse"]
    assert modes[4] == "blocks 0 reverse, 1 store, 2 reverse, 3 store"


def test_undo_restores_the_models_own_gradient_checkpointing() -> None:
    model, _ = gpt2()
    convert(model, "bdia").undo()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing


def test_a_layer_with_cross_attention_becomes_one_branch() -> None:
    model, batch = gpt2(add_cross_attention=True, is_decoder=True)
    model.train()
    encoded = torch.randn(3, 4, 16, requires_grad=True)
    stack = convert(model, "two_stream", memory="store").stack
    stored = gradients(model, {**batch, "encoder_hidden_states": encoded})
    given, encoded.grad = encoded.grad, None
    stack.memory = "reverse"
    assert_same_bits(gradients(model, {**batch, "encoder_hidden_states": encoded}), stored)
    assert torch.equal(encoded.grad, given)
    assert stack.parts == "layers"


@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
@pytest.mark.parametrize("precision", ["weights", "autocast"])
def test_low_precision_gives_bit_identical_gradients_too(make: Any, recipe: str, precision: str) -> None:
    model, batch = make()
    model.train()
    if precision == "weights":
        model.bfloat16()
        batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    stack = convert(model, recipe, memory="store").stack
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        stored = gradients(model, batch)
        stack.memory = "reverse"
        assert_same_bits(gradients(model, batch), stored)
    assert stack.parts == ("layers" if recipe == "bdia" else "attention and feed-forward")
