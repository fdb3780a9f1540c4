"""`convert` on layers that return more than their hidden states, take unusual arguments, or cannot be converted."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde import convert
from small_models import Layer, Model, assert_same_bits, gradients


class Returning(Layer):
    """A layer that returns what a function of its hidden states, mask and bias returns."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__(8)
        self.form = form

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, **flags: Any) -> Any:
        y = super().forward(x, mask)
        return self.form(y if bias is None else y + bias, mask, bias)


class Unpacking(Model):
    """Calls such layers, and passes the last item that each returns to the next."""

    def __init__(self, form: Callable[..., Any], depth: int = 4) -> None:
        super().__init__(depth)
        self.layers = nn.ModuleList(Returning(form) for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor | None = None, **flags: Any) -> Tensor:
        x, bias = self.embed(x), None
        for layer in self.layers:
            x, *_, bias = layer(x, mask, bias, **flags)
        return self.head(x)


def alone(y: Tensor, mask: Any, bias: Any) -> Any:
    return y, None


def beside_its_arguments(y: Tensor, mask: Any, bias: Any) -> Any:
    return y, mask, bias


def in_a_list(y: Tensor, mask: Any, bias: Any) -> Any:
    return [y, None]


def with_weights(y: Tensor, mask: Any, bias: Any) -> Any:
    return y, y.softmax(-1), None


def batch() -> dict[str, Any]:
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mask": torch.ones(6, 6, dtype=torch.bool).tril()}


@pytest.mark.parametrize("form", [alone, beside_its_arguments, in_a_list, with_weights])
@pytest.mark.parametrize("recipe", ["bdia", "momentum", "two_stream"])
def test_a_layer_may_return_other_items_besides_its_hidden_states(form: Any, recipe: str) -> None:
    torch.manual_seed(0)
    model, plain = Unpacking(form).train(), Model().train()
    plain.load_state_dict(model.state_dict())
    convert(plain, recipe, branches="whole")
    expected = gradients(plain, batch())
    stack = convert(model, recipe, branches="whole").stack
    assert_same_bits(gradients(model, batch()), expected)
    stack.memory = "store"
    assert_same_bits(gradients(model, batch()), expected)


def test_a_value_that_the_first_layer_computes_for_the_others_is_refused_unless_that_layer_stays_unconverted() -> None:
    class Biased(Unpacking):
        """The first layer computes a bias from its own parameter, the others pass it on, as in T5."""

        def __init__(self) -> None:
            super().__init__(beside_its_arguments)
            first: Any = self.layers[0]
            first.bias = nn.Parameter(torch.randn(8))
            first.form = lambda y, mask, bias: (y, mask, 2 * first.bias)

    model = Biased().double().train()
    given = {"x": batch()["x"].double(), "mask": batch()["mask"]}
    refused = convert(model, "scaled")
    with pytest.raises(
        ValueError, match=r"Layer 1 .* got as bias a value that an earlier layer returned.*layers='name.of.list\[1:\]'"
    ):
        model(**given)
    refused.undo()
    x, first = model.embed(given["x"]), model.layers[0]
    before, _, bias = first(x, given["mask"])
    now, before = before, before
    for layer in model.layers[1:]:
        before, now = now, before / 16 + layer(now, given["mask"], bias)[0]
    model.head(now).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert "layers.0.bias" in expected
    for memory in ("store", "reverse"):
        conversion = convert(model, "scaled", layers="layers[1:]", exact=False, memory=memory)  # type: ignore[arg-type]
        actual = gradients(model, given)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-7, atol=1e-10)
        conversion.undo()


def test_items_that_are_unknown_before_a_layer_runs_raise_an_error_that_says_why() -> None:
    model = Unpacking(with_weights)
    convert(model, "scaled")
    with pytest.raises(ValueError, match=r"output_attentions=True was given, and Returning returns its attentions"):
        model(**batch(), output_attentions=True)
    model = Unpacking(lambda y, mask, bias: (y, 5, None))
    convert(model, "scaled")
    with pytest.raises(TypeError, match=r"Returning returned a value of type int as item 1, besides its hidden states"):
        model(**batch())
    model = Unpacking(lambda y, mask, bias: {"hidden": y})
    convert(model, "scaled")
    with pytest.raises(TypeError, match=r"Returning returned a dict, but .* alone or as the first item of a tuple"):
        model(**batch())
    model = Unpacking(lambda y, mask, bias: (y[:, ::2], None))
    convert(model, "scaled")
    with pytest.raises(ValueError, match=r"given hidden states of shape \(2, 6, 8\) and returned \(2, 3, 8\)"):
        model(**batch())


def test_the_trial_of_a_layer_leaves_no_trace() -> None:
    recording: ContextVar[list[Tensor] | None] = ContextVar("recording", default=None)

    class Noisy(Returning):
        def __init__(self) -> None:
            super().__init__(alone)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor, mask: Any = None, bias: Any = None, seen: Any = None) -> Any:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2) + torch.rand(()) + random.random()
            if seen is not None:
                x = x + seen[0]
                seen[0] = seen[0] + 1
            if (recorded := recording.get()) is not None:
                recorded.append(x)
            return super().forward(x, mask)

    def run(model: nn.Module) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        random.seed(0)
        inputs: list[Tensor] = []
        token = recording.set(inputs)
        output = model(**batch(), seen=[torch.zeros(())])
        recording.reset(token)
        return output, len(inputs)

    model = Unpacking(alone)
    model.layers = nn.ModuleList(Noisy() for _ in range(3))
    convert(model.train(), "scaled", memory="store")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    first, recorded = run(model)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    second, recorded_without_trial = run(model)
    assert torch.equal(first, second)
    assert recorded == recorded_without_trial == 3
    assert_same_bits(dict(model.state_dict()), after)


def test_layers_that_take_their_input_several_times_get_the_recomputed_one() -> None:
    class Thrice(Layer):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(query) + key * value

    class Calling(Model):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, x, value=x)
            return self.head(x)

    model = Calling().double()
    model.layers = nn.ModuleList(Thrice(8) for _ in range(4)).double()
    x = batch()["x"].double()
    before = now = model.embed(x)
    for layer in model.layers:
        before, now = now, before / 16 + layer(now, now, now)
    model.head(now).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    convert(model, "scaled", exact=False)
    for name, gradient in gradients(model, {"x": x}).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-7, atol=1e-10)


def test_hidden_states_of_an_earlier_layer_as_an_argument_are_refused() -> None:
    class Skipping(Model):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            first = self.layers[0](self.embed(x))
            return self.head(self.layers[2](self.layers[1](first), first))

    model = Skipping(depth=3)
    convert(model, "scaled")
    with pytest.raises(ValueError, match="Layer 2 of a converted model got as mask a value that an earlier layer"):
        model(batch()["x"])


def test_arguments_may_have_any_name() -> None:
    class Numbered(Layer):
        def forward(self, x: Tensor, stack: float, index: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) * stack + index

    class Numbering(Model):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(x)
            for index, layer in enumerate(self.layers):
                x = layer(x, stack=0.5, index=index)
            return self.head(x)

    model = Numbering()
    model.layers = nn.ModuleList(Numbered(8) for _ in range(4))
    conversion = convert(model.train(), "bdia", memory="store")
    stored = gradients(model, {"x": batch()["x"]})
    conversion.stack.memory = "reverse"
    assert_same_bits(gradients(model, {"x": batch()["x"]}), stored)


class Gated(Layer):
    """Multiplies its feed-forward by a parameter, which is initialised with ones."""

    def __init__(self) -> None:
        super().__init__(8)
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.gate * self.mlp(self.norm2(x))


def test_parameters_outside_of_attention_and_feed_forward_are_trained_too() -> None:
    model = Model()
    model.layers = nn.ModuleList(Gated() for _ in range(3))
    with pytest.raises(ValueError, match="or do not hold all its parameters"):
        convert(model, "two_stream", branches="split")
    stack = convert(model, "two_stream").stack
    assert len([name for name in gradients(model, batch()) if name.endswith("gate")]) == 3
    assert stack.parts == "layers"


def test_the_parts_of_every_layer_are_compared_with_it_not_only_those_of_the_first() -> None:
    class Doubling(Layer):
        factor = 1.0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = x + self.attn(self.norm1(x), mask)
            return x + self.factor * self.mlp(self.norm2(x))

    model = Model()
    model.layers = nn.ModuleList(Doubling(8) for _ in range(3))
    model.layers[2].factor = 2.0  # type: ignore[assignment]
    conversion = convert(model, "two_stream")
    with pytest.warns(UserWarning, match=r"parts of Doubling .* do not make up the layer.* in layer 2"):
        model.eval()(**batch())
    assert not any(module.training for module in model.modules())
    assert conversion.stack.parts == "layers"


def test_layers_that_are_skipped_at_random_are_refused() -> None:
    model = Model()
    model.layerdrop = 0.1
    with pytest.raises(ValueError, match=r"Model skips layers of 'layers' at random .*layerdrop=0\.1.*Set it to 0"):
        convert(model, "bdia")
    model.layerdrop = 0.0
    convert(model, "bdia")


def test_some_layers_of_a_list_can_be_converted() -> None:
    model = Model(depth=5).train()
    conversion = convert(model, "scaled", layers="layers[1:4]", memory="store")
    assert conversion.stack.place.first == 1
    assert [original.layer for original in conversion.stack.originals] == list(model.layers)[1:4]
    stored = gradients(model, batch())
    conversion.stack.memory = "reverse"
    assert_same_bits(gradients(model, batch()), stored)
    with pytest.raises(ValueError, match="converted already"):
        convert(model, layers="layers[3:]")
    convert(model, layers="layers[4:]").undo()
    with pytest.raises(ValueError, match=r"'layers\[5:\]' selects none of the 5 layers"):
        convert(model, layers="layers[5:]")
    with pytest.raises(ValueError, match=r"has no part 'layers\[-1:\]'"):
        convert(model, layers="layers[-1:]")


def test_the_error_names_the_lists_to_choose_from() -> None:
    model = Model()
    model.layers = nn.ModuleList([Layer(8), Gated(), Layer(8)])
    with pytest.raises(
        ValueError, match=r"no lists of two or more layers of one class\. Lists of several classes: 'layers'"
    ):
        convert(model)
    convert(model, layers="layers")
    model.stages = nn.ModuleList(nn.ModuleList(Layer(8) for _ in range(2)) for _ in range(2))
    with pytest.raises(ValueError, match=r"'stages' is a list of lists; name one of these, as in layers='stages\.0'"):
        convert(model, layers="stages")
