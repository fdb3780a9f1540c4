"""`convert` finds layers wherever models have them: nn.Sequential, several lists, lists behind wrappers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import retrograde as rg
from retrograde import convert
from small_models import Layer, Model, assert_same_bits, gradients
from vision_packages import imported

RECIPES = ["unchanged", "bdia", "momentum"]


class InSequence(Model):
    """The layers are an nn.Sequential, as in timm's models and many hand-written ones."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__(depth, width)
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class Pair(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Model(), InSequence()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x) + self.encoder(x)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))}


def check(model: nn.Module, inputs: dict[str, Any], recipe: str, **options: Any) -> Any:
    """Convert a model: stored and recomputed gradients agree to the bit, with the original ones too if it says so."""
    model.train()
    original = gradients(model, inputs)
    conversion = convert(model, recipe, memory="store", **options)
    stored = gradients(model, inputs)
    for stack in conversion.stacks.values():
        stack.memory = "reverse"
    assert_same_bits(gradients(model, inputs), stored)
    assert stored.keys() == original.keys()
    if recipe == "unchanged":
        assert_same_bits(stored, original)
    else:
        assert any(not torch.equal(stored[name], original[name]) for name in stored)
    return conversion


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_nn_sequential_of_layers_is_found(recipe: str) -> None:
    assert check(InSequence(), batch(), recipe).layers == ("layers",)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["layers only", "with embedding and head"])
def test_a_model_that_is_an_nn_sequential_itself_is_converted(recipe: str, kind: str) -> None:
    layers = [Layer(8) for _ in range(4)]
    if kind == "layers only":
        conversion = check(nn.Sequential(*layers), {"input": torch.randn(2, 6, 8)}, recipe)
    else:
        model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2))
        conversion = check(model, {"input": torch.randn(2, 6, 3)}, recipe, layers="[1:5]")
        assert len(model) == 6
    assert len(conversion.stack) == 4
    conversion.undo()
    assert not any(isinstance(module, rg.ReversibleSequence) for module in conversion.model.modules())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layers", [["encoder.layers", "decoder.layers[1:]"], "*.layers"])
def test_several_lists_are_converted_in_one_call(recipe: str, layers: Any) -> None:
    model = Pair()
    conversion = check(model, batch(), recipe, layers=layers)
    assert list(conversion.layers) == (layers if isinstance(layers, list) else ["encoder.layers", "decoder.layers"])
    with pytest.raises(ValueError, match=r"2 stacks: choose one, as in conversion\.stacks\['encoder\.layers'\]"):
        _ = conversion.stack
    report = conversion.measure(batch())
    assert report.layers == sum(map(len, conversion.stacks.values()))
    assert report.gradient_error == 0
    expected = copy.deepcopy(model)
    conversion.undo()
    with torch.no_grad():
        original = model.eval()(**batch())
    with torch.no_grad():
        assert torch.equal(expected.eval()(**batch()), original) == (recipe != "momentum")


def test_nothing_is_converted_if_one_of_several_lists_cannot_be() -> None:
    model = Pair()
    with pytest.raises(ValueError, match=r"Pair has no part 'decoder\.blocks'"):
        convert(model, layers=["encoder.layers", "decoder.blocks"])
    with pytest.raises(ValueError, match="was named twice"):
        convert(model, layers=["encoder.layers", "encoder.layers[2:]"])
    with pytest.raises(ValueError, match=r"Pair has no part '\*\.blocks'"):
        convert(model, layers="*.blocks")
    assert not any(isinstance(module, rg.ReversibleSequence) for module in model.modules())


@pytest.mark.parametrize("given", ["the list itself", "a list of lists", "a number"])
def test_layers_that_are_not_named_are_refused_in_a_sentence(given: str) -> None:
    model = Pair()
    layers: Any = {
        "the list itself": model.encoder.layers,
        "a list of lists": [model.encoder.layers, model.decoder.layers],
        "a number": 3,
    }[given]
    with pytest.raises(TypeError, match=r"layers= got a (ModuleList|list|int), and takes names in the model: layers="):
        convert(model, layers=layers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, partial(torch.compile, backend="eager")], ids=["DataParallel", "torch.compile"]
)
def test_lists_behind_a_wrapper_of_the_model_are_found(recipe: str, wrap: Any) -> None:
    model = Model()
    conversion = convert(wrap(model), recipe)
    assert conversion.layers[0].endswith(".layers")
    assert all(gradient.isfinite().all() for gradient in gradients(model.train(), batch()).values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_behind_wrappers_of_their_own_are_converted(recipe: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    for wrap in (Wrapper, checkpoint_wrapper):
        model = Model()
        model.layers = nn.ModuleList(wrap(layer) for layer in model.layers)
        check(model, batch(), recipe)


def test_an_nn_sequential_of_operators_is_no_list_of_layers() -> None:
    with pytest.raises(ValueError, match="has no lists of two or more layers"):
        convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 3}
SWIN = {"img_size": 64, "window_size": 4, "embed_dim": 8, "depths": (2, 3), "num_heads": (2, 2), "num_classes": 3}
TIMM = {
    "vit_tiny_patch16_224": (VIT, None),
    "deit_tiny_patch16_224": (VIT, None),
    "swin_tiny_patch4_window7_224": (SWIN, "layers.*.blocks"),
}


@pytest.mark.interop
@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("recipe", RECIPES)
def test_models_of_timm_are_converted(name: str, recipe: str) -> None:
    timm = imported("timm")
    options, layers = TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, drop_path_rate=0.1, **options)
    model.set_grad_checkpointing()
    conversion = check(model, {"x": torch.randn(2, 3, options["img_size"], options["img_size"])}, recipe, layers=layers)
    for enable, memory in ((False, {"store"}), (True, {"checkpoint" if recipe == "unchanged" else "reverse"})):
        model.set_grad_checkpointing(enable)
        assert all({*stack.memory.memory} == memory for stack in conversion.stacks.values())
    assert not [n for n, module in model.named_modules() if getattr(module, "grad_checkpointing", False)]


def _dit(diffusers: Any) -> tuple[nn.Module, dict[str, Any], Any]:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    inputs = {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), **inputs}, None


def _pixart(diffusers: Any) -> tuple[nn.Module, dict[str, Any], Any]:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=3, sample_size=8,
        patch_size=2, cross_attention_dim=16, caption_channels=12, use_additional_conditions=False,
    )  # fmt: skip
    inputs = {"encoder_hidden_states": torch.randn(2, 5, 12), "timestep": torch.tensor([3, 7])}
    added = {"resolution": None, "aspect_ratio": None}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), **inputs, "added_cond_kwargs": added}, None


@pytest.mark.interop
@pytest.mark.parametrize("make", [_dit, _pixart])
@pytest.mark.parametrize("recipe", RECIPES)
def test_models_of_diffusers_are_converted(make: Any, recipe: str) -> None:
    torch.manual_seed(0)
    model, inputs, layers = make(imported("diffusers"))
    model.enable_gradient_checkpointing()
    conversion = check(Sampled(model), inputs, recipe, layers=layers)
    model.disable_gradient_checkpointing()
    assert {*conversion.stack.memory.memory} == {"store"}
    model.enable_gradient_checkpointing()
    assert {*conversion.stack.memory.memory} == {"checkpoint" if recipe == "unchanged" else "reverse"}
    assert not model.is_gradient_checkpointing


class Sampled(nn.Module):
    """Returns the sample of a diffusers model, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        sample: Tensor = self.model(**inputs).sample
        return sample
