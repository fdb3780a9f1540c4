"""`convert` on Hugging Face Transformers architectures, against their own layers in plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, AUDIO, EXPERTS, GROUPED, Architecture
from retrograde import convert
from retrograde.conversion import recipes
from small_models import assert_same_bits, gpt2, gradients

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.interop,
    # what transformers does itself
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning"),
]
GENERATING = [name for name, architecture in ARCHITECTURES.items() if architecture.text]


@pytest.fixture(params=ARCHITECTURES, name="architecture")
def _architecture(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


def converted(model: nn.Module, architecture: Architecture, recipe: Any, **options: Any) -> list[Any]:
    return [convert(model, recipe, layers=layers, **options) for layers in architecture.layers]


def test_in_eval_bdia_changes_nothing(architecture: Architecture) -> None:
    model, batch = architecture.make()
    model.eval()
    expected = model(**batch)
    converted(model, architecture, "bdia")
    output = model(**batch)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
@pytest.mark.filterwarnings("ignore:The parts of .* recognised by their names:UserWarning")
def test_recomputed_and_stored_activations_give_bit_identical_gradients(
    architecture: Architecture, recipe: str
) -> None:
    model, batch = architecture.make()
    model.train()
    parameters = gradients(model, batch).keys()
    conversions = converted(model, architecture, recipe, memory="store")
    stored = gradients(model, batch)
    assert stored.keys() == parameters
    for conversion in conversions:
        conversion.stack.memory = "reverse"
    assert_same_bits(gradients(model, batch), stored)


def by_hand(layers: list[nn.Module], gamma: float) -> list[Any]:
    """Hooks that apply the formula of the recipe "annealed" to layers in a row, in plain autograd."""
    state: dict[str, Tensor] = {}

    def hook(index: int, args: Any, kwargs: Any, output: Any) -> Any:
        new = output[0] if isinstance(output, (tuple, list)) else output
        x = args[0] if args else next(iter(kwargs.values()))
        own = gamma if index else 0.0
        mixed = own * state.get("before", x) + (1 - own) * x + (1 + own) * (new - x)
        state["before"] = x
        return type(output)([mixed, *output[1:]]) if isinstance(output, (tuple, list)) else mixed

    return [
        layer.register_forward_hook(lambda _, args, kwargs, out, i=i: hook(i, args, kwargs, out), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_converted_layers_compute_the_formula_of_the_recipe_on_the_models_own_layers(
    architecture: Architecture, memory: Any
) -> None:
    model, batch = architecture.make()
    model.config._experts_implementation = "eager"  # the only one for float64
    model.double().eval()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    conversions = converted(model, architecture, recipes.Annealed(0.5), exact=False, memory=memory)
    actual = gradients(model, batch)
    layers = [[original.layer for original in conversion.stack.originals] for conversion in conversions]
    for conversion in conversions:
        conversion.undo()
    unconverted = gradients(model, batch)
    hooks = [hook for row in layers for hook in by_hand(row, 0.5)]
    expected = gradients(model, batch)
    for hook in hooks:
        hook.remove()
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-6, atol=1e-9 * largest)
    assert any((expected[name] - unconverted[name]).norm() > 1e-6 * largest for name in expected), (
        "the recipe does nothing"
    )


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("recipe", ["bdia", "momentum"])
def test_generate_with_its_cache_continues_as_without_one(name: str, recipe: str) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = architecture.make()
    model.eval()
    ids = batch["input_ids"][1:, :5]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    converted(model, architecture, recipe)
    cached = model.generate(ids, **options, use_cache=True)
    assert torch.equal(cached, model.generate(ids, **options, use_cache=False))
    if recipe == "bdia":
        assert torch.equal(cached, expected)


def test_the_trial_runs_of_the_first_call_record_no_router_outputs() -> None:
    config = {**EXPERTS, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 1.0}
    model, batch = Architecture("MixtralForCausalLM", config).make()
    model.train()
    stack = convert(model, "two_stream").stack
    first, second = gradients(model, batch), gradients(model, batch)
    assert stack.parts == "attention and feed-forward"
    assert_same_bits(first, second)


def test_a_model_whose_feed_forwards_differ_from_layer_to_layer_is_converted() -> None:
    config = {**GROUPED, "head_dim": 4, "num_local_experts": 2, "intermediate_size_mlp": 32, "moe_layers": [1]}
    model, batch = Architecture("Llama4ForCausalLM", config).make()
    stack = convert(model.train(), "two_stream", memory="store").stack
    with pytest.warns(UserWarning, match=r"parts of Llama4TextDecoderLayer .* in layer 1"):
        stored = gradients(model, batch)
    stack.memory = "reverse"
    assert_same_bits(gradients(model, batch), stored)


def test_a_cache_of_recurrent_states_is_omitted_while_empty_and_refused_when_filled() -> None:
    model, batch = ARCHITECTURES["mamba"].make()
    model.eval()
    convert(model, "scaled")
    with_cache, without = (
        gradients(model, {**batch, "use_cache": True}),
        gradients(model, {**batch, "use_cache": False}),
    )
    assert_same_bits(with_cache, without)
    with torch.no_grad():
        cache = model(batch["input_ids"], use_cache=True).cache_params
    with pytest.raises(ValueError, match="cache_params holds earlier states, and gradients are enabled"):
        model(batch["input_ids"][:, :1], cache_params=cache, use_cache=True)


def test_learned_keys_get_their_gradients_with_stored_activations() -> None:
    model, batch = gpt2()
    model.eval()
    prefix = torch.randn(4, 2, 3, 2, 2, 8, requires_grad=True)  # layers, keys and values, samples, heads, places, width

    def gradient() -> Tensor:
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(2 * prefix):
            cache.update(keys, values, layer)
        model(batch["input_ids"], past_key_values=cache).logits.square().mean().backward()
        result, prefix.grad = prefix.grad, None
        assert result is not None
        return result

    conversion = convert(model, recipes.ScaledResidual(1 / 256), exact=False, memory="store")
    first, second = gradient(), gradient()
    conversion.undo()
    assert torch.equal(first, second)
    assert (first - gradient()).norm() < 0.1 * first.norm()


def test_relative_positions_that_the_first_layer_computes_raise_an_error_that_says_what_to_do() -> None:
    model, batch = ARCHITECTURES["t5"].make()
    convert(model.train(), "bdia", layers="encoder.block")
    with pytest.raises(ValueError, match=r"Layer 1 .* as position_bias .*layers='name.of.list\[1:\]'"):
        model(**batch)


def test_layer_drop_in_the_config_is_refused() -> None:
    model, _ = Architecture("Wav2Vec2ForCTC", {**AUDIO, "layerdrop": 0.1}).make()
    with pytest.raises(ValueError, match=r"config\.layerdrop=0\.1.*Set it to 0 before you convert"):
        convert(model, "bdia")


def test_checkpointing_that_was_on_does_not_wrap_the_stack_and_is_restored_by_undo() -> None:
    model, batch = gpt2()
    model.train()
    model.gradient_checkpointing_enable()
    conversion = convert(model, "scaled", memory="store")
    runs: list[int] = []
    model.transformer.h[0].ln_1.register_forward_hook(lambda *_: runs.append(1))
    gradients(model, batch)
    runs.clear()
    gradients(model, batch)
    assert len(runs) == 1
    assert conversion.undo().is_gradient_checkpointing
    runs.clear()
    gradients(model, batch)
    assert len(runs) == 2
