"""What a converted list cannot do is an error with the remedy: mixed modes, states between layers, a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde import convert
from small_models import Model, gpt2, gradients


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("eval_layers", [[3], [0], [1, 2]])
def test_bdia_with_some_layers_in_eval_is_an_error_that_names_them(eval_layers: list[int]) -> None:
    model = Model().train()
    convert(model, "bdia")
    for i in eval_layers:
        model.layers[i].eval()
    named = ", ".join(map(str, eval_layers))
    with pytest.raises(RuntimeError, match=rf"'layers'.* layers? {named} .* in eval mode.*layers\.train\(\)"):
        model(**batch())
    model.eval()
    assert model(**batch()).isfinite().all()


@pytest.mark.parametrize("recipe", ["momentum", "two_stream"])
def test_recipes_that_compute_the_same_in_both_modes_run_with_some_layers_in_eval(recipe: str) -> None:
    model = Model(dropout=0.5).train()
    convert(model, recipe)
    model.layers[3].eval()
    assert all(gradient.isfinite().all() for gradient in gradients(model, batch()).values())


class ReadsAnEarlierLayer(Model):
    """Its head reads the states before the last layer, as LLaVA's does with its vision tower."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        states = [self.embed(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.head(states[-2])


@pytest.mark.parametrize("recipe", ["bdia", "scaled"])
def test_reading_states_between_converted_layers_is_an_error_with_the_remedy(recipe: str) -> None:
    model = ReadsAnEarlierLayer().train()
    conversion = convert(model, recipe)
    with pytest.raises(RuntimeError, match=r"after layer 2 of 'layers' .*layers='layers\[:3\]'"):
        model(**batch())
    conversion.undo()
    convert(model, recipe, layers="layers[:3]")
    assert all(gradient.isfinite().all() for gradient in gradients(model, batch()).values())


def test_states_between_converted_layers_can_be_passed_on_and_their_shape_read() -> None:
    class Reading(Model):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
                assert (x.shape, x.size(0), x.dtype, x.device.type, x.ndim, len(x)) == (
                    (2, 6, 8), 2, torch.float32, "cpu", 3, 2,
                )  # fmt: skip
            return self.head(x)

    model = Reading().train()
    convert(model, "scaled")
    assert model(**batch()).isfinite().all()
    assert "Placeholder" in repr(model.layers[0](torch.randn(2, 6, 8)))


@pytest.mark.interop
def test_hidden_states_asked_for_in_training_raise_when_they_are_read() -> None:
    model, inputs = gpt2()
    model.train()
    convert(model, "bdia")
    output = model(**inputs, output_hidden_states=True)
    assert output.loss.isfinite()
    for state in output.hidden_states[1:-1]:
        with pytest.raises(RuntimeError, match=r"of 'transformer\.h' .*conversion\.original\(\).*'unchanged'"):
            state.mean()


@pytest.mark.interop
def test_the_vision_tower_of_llava_is_refused_or_right() -> None:
    tf = pytest.importorskip("transformers")
    vision = tf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = tf.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    model = tf.LlavaForConditionalGeneration(config).train()
    tokens = torch.tensor([[63, 63, 63, 63, 5, 6, 7]])
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 16, 16), "labels": tokens}
    layers = next(name for name, module in model.named_modules() if name.endswith("vision_tower.encoder.layers"))
    conversion = convert(model, "bdia", layers=layers)
    with pytest.raises(RuntimeError, match=r"after layer 1 of .*encoder\.layers\[:2\]"):
        model(**inputs)
    conversion.undo()
    convert(model, "bdia", layers=f"{layers}[:2]")
    actual = gradients(model, inputs)
    assert all(gradient.isfinite().all() for gradient in actual.values())
    assert any("vision_tower.encoder.layers.1" in name for name in actual)


@pytest.mark.parametrize("recipe", ["unchanged", "bdia", "scaled"])
def test_parameters_that_zero_3_partitions_are_refused_where_layers_are_recomputed(recipe: str) -> None:
    model = Model().train()
    for i, parameter in enumerate(model.parameters()):
        parameter.ds_id = i  # type: ignore[attr-defined]  # as DeepSpeed marks them
    stack = convert(model, recipe).stack
    with pytest.raises(RuntimeError, match=r"partitioned by DeepSpeed ZeRO-3.*stage 0, 1 or 2.*memory='store'"):
        model(**batch())
    with torch.no_grad():
        model(**batch())
    stack.memory = "store"
    gradients(model, batch())


def test_a_second_conversion_or_undo_is_refused_in_a_sentence() -> None:
    model = Model()
    conversion = convert(model, "scaled")
    with pytest.raises(ValueError, match=r"'layers' of Model is converted already .*undo\(\)"):
        convert(model)
    with pytest.raises(ValueError, match=r"'layers' of Model is converted already"):
        convert(model, layers="layers")
    conversion.undo()
    with pytest.raises(RuntimeError, match=r"undone already"):
        conversion.undo()
    with pytest.raises(RuntimeError, match=r"undone already"):
        conversion.measure(batch())
    convert(model, "bdia").undo()


def test_one_conversion_undone_leaves_another_of_the_same_model() -> None:
    model = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    first, second = (convert(model, "scaled", layers=f"{name}.layers") for name in model)
    first.undo()
    with pytest.raises(ValueError, match=r"'decoder\.layers' of ModuleDict is converted already"):
        convert(model, layers="decoder.layers")
    second.undo()
    assert not any(isinstance(module, rg.ReversibleSequence) for module in model.modules())


def reversible() -> nn.Module:
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    return nn.Sequential(nn.Linear(3, 8), stack)


@pytest.mark.parametrize("layers", [None, "1.blocks", "1"])
def test_a_model_that_is_reversible_already_is_refused_in_a_sentence(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"is reversible already: '1' is a ReversibleSequence"):
        convert(reversible(), layers=layers)
