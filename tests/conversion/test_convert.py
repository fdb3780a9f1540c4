"""`convert` on plain lists of residual layers, without other packages."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde import convert
from retrograde.conversion import recipes
from retrograde.diagnose import examine
from small_models import Layer, Mixing, Model, assert_same_bits, gradients

RECIPES = ["bdia", "two_stream", "momentum", "scaled", recipes.Annealed(0.5), recipes.Annealed(1.0)]


def batch(samples: int = 3) -> dict[str, Any]:
    x = torch.randn(samples, 6, 3, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mask": torch.ones(6, 6, dtype=torch.bool).tril()}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_every_memory_mode_gives_the_same_bits(recipe: Any) -> None:
    model = Model(dropout=0.2).train()
    stack = convert(model, recipe, memory="store").stack
    stored = gradients(model, batch())
    for memory in ("reverse", "checkpoint"):
        stack.memory = memory
        assert_same_bits(gradients(model, batch()), stored)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_parameters_and_their_names_do_not_change(recipe: Any) -> None:
    model = Model()
    before = dict(model.named_parameters())
    convert(model, recipe)
    after = dict(model.named_parameters())
    assert list(before) == list(after) == list(model.state_dict())
    assert all(before[name] is after[name] for name in before)


def reference(model: Model, x: Tensor, mask: Tensor) -> Tensor:
    """Two streams and their mean, in plain autograd."""
    first = second = model.embed(x)
    for layer in model.layers:
        first = first + layer.attn(layer.norm1(second), mask)
        second = second + layer.mlp(layer.norm2(first))
    return model.head((first + second) / 2)


def test_two_streams_compute_the_outputs_and_gradients_of_the_formula() -> None:
    model = Model().double()
    x, mask = batch()["x"].double(), batch()["mask"]
    expected = reference(model, x, mask)
    expected.square().mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    conversion = convert(model, "two_stream", exact=False)
    actual = gradients(model, {"x": x, "mask": mask})
    torch.testing.assert_close(model(x, mask), expected, rtol=1e-12, atol=1e-12)
    assert conversion.stack.parts == "attention and feed-forward"
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)


def formula(model: Model, x: Tensor, mask: Tensor, recipe: Any) -> Tensor:
    """The recipes on whole layers, in plain autograd and without a grid."""
    before = now = model.embed(x)
    velocity = torch.zeros_like(now)
    for i, layer in enumerate(model.layers):
        if isinstance(recipe, recipes.Momentum):
            velocity = recipe.beta * velocity + (1 - recipe.beta) * (layer(now, mask) - now)
            now = now + velocity
        elif isinstance(recipe, recipes.ScaledResidual):
            before, now = now, recipe.keep * before + layer(now, mask)
        else:
            gamma = recipe.gamma if i else 0.0
            before, now = now, gamma * before + (1 - gamma) * now + (1 + gamma) * (layer(now, mask) - now)
    if isinstance(recipe, recipes.Momentum):
        now = now + recipe.beta / (1 - recipe.beta) * velocity
    return model.head(now)


@pytest.mark.parametrize(
    "recipe",
    [recipes.Momentum(0.25), recipes.ScaledResidual(0.25), recipes.Annealed(0.5), recipes.Annealed(1.0)],
    ids=str,
)
@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_recipes_on_whole_layers_compute_their_formulas(recipe: Any, memory: Any) -> None:
    model = Model().double()
    x, mask = batch()["x"].double(), batch()["mask"]
    expected = formula(model, x, mask, recipe)
    expected.square().mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    convert(model, recipe, exact=False, memory=memory)
    torch.testing.assert_close(model(x, mask), expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients(model, {"x": x, "mask": mask}).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_replay_uses_the_state_of_the_first_run_and_detects_in_place_edits(recipe: Any) -> None:
    class Normed(Mixing):
        """Has running statistics, which a replay must not update a second time."""

        def __init__(self) -> None:
            super().__init__(8)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2), mask)

    model = Model(dropout=0.2)
    for layer in model.layers:
        layer.attn = Normed()
    model.train()
    stack = convert(model, recipe, branches="auto", memory="store").stack
    start = copy.deepcopy(model.state_dict())
    stored = gradients(model, batch())
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    stack.memory = "reverse"
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(**batch()).square().mean()
    model.eval()
    loss.backward()
    assert_same_bits({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, stored)
    assert_same_bits(dict(model.state_dict()), after)
    loss = model.train()(**batch()).square().mean()
    with torch.no_grad():
        model.layers[0].mlp[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified|edited"):
        loss.backward()


@pytest.mark.parametrize("recipe", ["two_stream", "scaled"])
def test_each_layer_gets_the_arguments_of_its_own_call(recipe: Any) -> None:
    class Alternating(Model):
        """Every other layer has another mask, as in models with sliding windows."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(x)
            for i, layer in enumerate(self.layers):
                x = layer(x, mask=mask if i % 2 else None)
            return self.head(x)

    model = Alternating().double()
    x, mask = batch()["x"].double(), batch()["mask"]
    masks = [None, mask, None, mask]
    if recipe == "scaled":
        before = now = model.embed(x)
        for layer, own in zip(model.layers, masks, strict=True):
            before, now = now, before / 16 + layer(now, own)
    else:
        first = now = model.embed(x)
        for layer, own in zip(model.layers, masks, strict=True):
            first = first + layer.attn(layer.norm1(now), own)
            now = now + layer.mlp(layer.norm2(first))
        now = (first + now) / 2
    expected = model.head(now)
    convert(model, recipe, exact=False)
    torch.testing.assert_close(model(x, mask), expected, rtol=1e-12, atol=1e-12)


def test_with_momentum_every_update_enters_the_output_in_full() -> None:
    """Where no layer depends on its input, momentum is the original network, whatever beta."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.update = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x + self.update

    model = Model().double()
    model.layers = nn.ModuleList(Constant() for _ in range(4)).double()
    x = batch()["x"].double()
    expected = model(x)
    convert(model, recipes.Momentum(0.5), exact=False)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_memory_does_not_grow_with_depth_without_side_bits() -> None:
    def peaks(depth: int) -> dict[str, int]:
        report = convert(Model(depth, width=32), "two_stream", batch=batch(16)).report
        assert report is not None
        return report.peaks

    shallow, deep = peaks(4), peaks(12)
    assert deep["reverse"] < 1.02 * shallow["reverse"]
    assert deep["original"] > 2.5 * shallow["original"]
    assert deep["checkpoint"] > shallow["checkpoint"]


def test_the_report_leaves_the_model_as_it_was() -> None:
    model = Model(dropout=0.1).train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, state = {n: p.clone() for n, p in model.state_dict().items()}, torch.get_rng_state()
    report = convert(model, "momentum", batch=batch()).report
    assert report is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(dict(model.state_dict()), before)
    assert model.training
    assert model.embed.weight.grad is None
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert (report.layers, report.side_bits, report.gradient_error, report.drift) == (4, 1.0, 0.0, 0.0)
    assert report.side_bytes == 4 * report.stream_bytes // 32
    assert 0 < report.logits_difference < 1
    assert "Momentum(beta=0.5) on 4 layers" in str(report)


def test_the_report_shows_drift_without_a_grid() -> None:
    model = Model(depth=12)
    report = convert(model, recipes.ScaledResidual(0.125), exact=False, batch=batch()).report
    assert report is not None
    assert report.drift > 1e-3
    assert report.gradient_error > 1e-5


def test_the_report_warns_once_of_parts_that_do_not_make_up_the_layer() -> None:
    class Halved(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return (super().forward(x, mask) + x) / 2

    model = Model()
    model.layers = nn.ModuleList(Halved(8) for _ in range(3))
    with pytest.warns(UserWarning, match="parts of Halved"):
        report = convert(model, "two_stream", batch=batch()).report
    assert report is not None
    assert report.branches == "layers"
    model(**batch())  # without another warning, which would be an error


def test_the_report_is_short_and_so_is_what_is_printed_of_the_model() -> None:
    model = Model(depth=12)
    lines = len(repr(model).splitlines())
    conversion = convert(model, recipes.Momentum(0.25), batch=batch())
    assert repr(conversion) == ("Conversion(Model, recipe=Momentum(beta=0.25), layers='layers' (12), memory='reverse')")
    conversion.stack.memory = ["store"] * 2 + ["reverse"] * 10
    assert "memory='blocks 0-1 store, 2-11 reverse'" in repr(conversion)
    assert repr(conversion.stack).startswith("ConvertedStack(recipe=Momentum(beta=0.25), 12 layers, branches='layers'")
    assert len(repr(conversion.stack).splitlines()) == 1
    assert len(repr(model).splitlines()) == lines + 1
    assert len(str(conversion.report).splitlines()) == 7


def test_undo_restores_the_original_model() -> None:
    model = Model()
    expected = model(**batch())
    conversion = convert(model, "two_stream")
    changed = model(**batch())
    with conversion.original():
        assert torch.equal(model(**batch()), expected)
    assert conversion.undo() is model
    assert not torch.allclose(changed, expected)
    assert torch.equal(model(**batch()), expected)
    assert not any(isinstance(module, rg.ReversibleSequence) for module in model.modules())


def test_annealing_starts_with_the_original_function_and_ends_without_side_bits() -> None:
    model = Model()
    expected = model(**batch())
    conversion = convert(model, "annealed")
    assert torch.equal(model(**batch()), expected)
    distances, bits = [], []
    for gamma in (1 / 16, 0.25, 0.5, 1.0):
        conversion.anneal(gamma)
        distances.append(float((model(**batch()) - expected).norm().detach()))
        bits.append(conversion.measure(batch()).side_bits)
    assert distances == sorted(distances)
    assert bits == [4 * 3 / 4, 2 * 3 / 4, 1 * 3 / 4, 0.0]
    conversion.anneal(0.0)
    assert torch.equal(model(**batch()), expected)


def test_momentum_is_annealed_from_four_bits_to_one() -> None:
    model = Model()
    conversion = convert(model, "momentum", memory="store")
    bits = []
    for beta in (1 / 16, 1 / 4, 1 / 2):
        conversion.anneal(beta)
        bits.append(conversion.measure(batch()).side_bits)
        stored = gradients(model.train(), batch())
        conversion.stack.memory = "reverse"
        assert_same_bits(gradients(model, batch()), stored)
        conversion.stack.memory = "store"
    assert bits == [4.0, 2.0, 1.0]


def test_copies_and_pickles_are_converted_too_and_independent() -> None:
    model = Model().train()
    convert(model, "two_stream")
    expected = gradients(model, batch())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert_same_bits(gradients(twin, batch()), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1.0)


def test_threads_do_not_disturb_each_other() -> None:
    model = Model()
    convert(model, "two_stream")
    inputs = [torch.randn(2, 6, 3) for _ in range(4)]
    expected = [model(x) for x in inputs]
    outputs: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: outputs.update({i: model(inputs[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(outputs[i], expected[i]) for i in range(4))


def test_the_doctor_examines_a_converted_model() -> None:
    model = Model()
    convert(model, "two_stream")
    assert examine(model, batch()).healthy


def test_a_layer_whose_parts_do_not_make_it_up_becomes_one_branch() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))  # side by side

    model = nn.Module()
    model.layers = nn.ModuleList(Odd() for _ in range(3))
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))  # type: ignore[method-assign]
    conversion = convert(model, "two_stream")
    with pytest.warns(UserWarning, match=r"parts of Odd .* do not make up the layer"):
        model(torch.randn(2, 8))
    assert conversion.stack.parts == "layers"
    conversion.undo()
    convert(model, "two_stream", branches="split")
    with pytest.raises(ValueError, match="branches='whole'"):
        model(torch.randn(2, 8))


def test_parts_that_differ_from_the_layer_only_in_training_are_detected() -> None:
    class Forgetting(Layer):
        """Has a dropout with an unusual name."""

        def __init__(self) -> None:
            super().__init__(8)
            self.forget = nn.Dropout(0.5)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.forget(super().forward(x, mask) - x) + x

    model = Model()
    model.layers = nn.ModuleList(Forgetting() for _ in range(3))
    conversion = convert(model, "two_stream")
    with pytest.warns(UserWarning, match="parts of Forgetting"):
        model.eval()(**batch())
    assert conversion.stack.parts == "layers"


def test_streams_that_leave_the_range_continue_on_a_coarser_grid() -> None:
    model = Model().train()
    with torch.no_grad():
        model.embed.weight.mul_(2000)
    stack = convert(model, "bdia", memory="store").stack
    with pytest.warns(RuntimeWarning, match="continues with a grid of"):
        model(**batch())
    stored = gradients(model, batch())
    stack.memory = "reverse"
    assert_same_bits(gradients(model, batch()), stored)


def test_what_cannot_work_raises_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match="recipe='bda' is not known; choose one of 'unchanged', 'bdia'"):
        convert(Model(), "bda")
    with pytest.raises(ValueError, match="doubles the rounding error"):
        convert(Model(), "bdia", exact=False)
    with pytest.raises(ValueError, match="grid_bits=12 is for exact stacks"):
        convert(Model(), "two_stream", exact=False, grid_bits=12)
    with pytest.raises(ValueError, match="has no lists of two or more layers"):
        convert(nn.Linear(2, 2))
    pair = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    with pytest.raises(ValueError, match=r"2 lists .* 'encoder.layers', 'decoder.layers'"):
        convert(pair)
    convert(pair, layers="decoder.layers")
    with pytest.raises(ValueError, match="converted already"):
        convert(pair, layers="decoder.layers")
    with pytest.raises(ValueError, match="anneal is for the recipes 'annealed' and 'momentum'"):
        convert(Model(), "bdia").anneal(0.5)
    with pytest.raises(ValueError, match="from 1/256 to 1"):
        recipes.Annealed(2.0)
    with pytest.raises(ValueError, match="from 1/256 to less than 1"):
        recipes.Momentum(1.0)


class Skipping(Model):
    """Leaves out a layer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for layer in (self.layers[0], *self.layers[2:]):
            x = layer(x, mask=mask)
        return self.head(x)


def test_code_between_the_layers_is_detected() -> None:
    model = Model()
    convert(model, "two_stream")
    model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(RuntimeError, match=r"after layer 1 of 'layers' do not exist.*\(mul was called on them"):
        model(**batch())
    convert(skipping := Skipping(), "two_stream")
    with pytest.raises(RuntimeError, match=r"Layer 2 .* did not get what layer 1 returned"):
        skipping(**batch())


class Staged(nn.Module):
    """A list of lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Layer(8) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return x


def test_lists_in_a_list_are_converted_one_by_one_and_still_iterated() -> None:
    model, x = Staged().train(), torch.randn(2, 5, 8)
    conversions = [convert(model, "two_stream", layers=f"stages.{i}", memory="store") for i in range(2)]
    assert len(model.stages) == 2
    stored = gradients(model, {"x": x})
    for conversion in conversions:
        conversion.stack.memory = "reverse"
    assert_same_bits(gradients(model, {"x": x}), stored)
    for conversion in conversions:
        conversion.undo()
    assert not any(isinstance(module, rg.ReversibleSequence) for module in model.modules())
    with pytest.raises(ValueError, match=r"Staged has no part 'stages\.7' .* 'stages', 'stages\.0', 'stages\.1'"):
        convert(model, layers="stages.7")


@pytest.mark.gpu
def test_the_check_of_the_sublayers_uses_the_same_random_numbers_on_an_accelerator() -> None:
    device = torch.accelerator.current_accelerator()
    model = Model(dropout=0.5).to(device).train()
    on_device = {name: value.to(device) for name, value in batch().items()}
    stack = convert(model, "two_stream").stack
    gradients(model, on_device)
    assert stack.parts == "attention and feed-forward"
