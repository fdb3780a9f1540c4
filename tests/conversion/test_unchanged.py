"""The recipe "unchanged": the same function to the bit, in training and in eval, in less memory."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import retrograde as rg
from architectures import ARCHITECTURES, Architecture
from retrograde import convert
from retrograde.conversion import recipes
from retrograde.engine import step_cache
from retrograde.measure import MemoryTracker
from retrograde.planning import measured, plan
from small_models import TRANSFORMERS, Layer, Model, assert_same_bits, gpt2, gradients

pytestmark = [  # what transformers does itself
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning"),
]
MODES = ["store", "checkpoint", "selective", "offload", "reverse"]


def batch(samples: int = 3) -> dict[str, Any]:
    x = torch.randn(samples, 6, 3, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mask": torch.ones(6, 6, dtype=torch.bool).tril()}


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("mode", ["training", "eval"])
def test_gradients_are_those_of_the_original_model_to_the_bit(memory: Any, mode: str) -> None:
    model = Model(dropout=0.3).train(mode == "training")
    expected = gradients(model, batch())
    stack = convert(model, "unchanged", memory=memory).stack
    for _ in range(3):  # the engine learns from call to call
        assert_same_bits(gradients(model, batch()), expected)
    assert "reverse" not in stack.memory.memory


@pytest.mark.interop
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("memory", ["checkpoint", "selective"])
def test_transformers_train_to_the_bit(name: str, memory: Any) -> None:
    model, inputs = TRANSFORMERS[name]()
    model.train()
    expected = gradients(model, inputs)
    convert(model, "unchanged", memory=memory)
    for _ in range(2):
        assert_same_bits(gradients(model, inputs), expected)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["mixtral", "deberta", "t5", "bart", "swin", "wavlm", "jamba", "funnel", "mamba"])
def test_architectures_of_every_kind_train_to_the_bit(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make()
    model.train()
    expected = gradients(model, inputs)
    layers = [path.partition("[")[0] for path in architecture.layers if path is not None] or None
    convert(model, "unchanged", layers=layers, memory="checkpoint")
    assert_same_bits(gradients(model, inputs), expected)
    assert_same_bits(gradients(model, inputs), expected)


@pytest.mark.interop
def test_hidden_states_attentions_and_hooks_between_the_layers_work_as_before() -> None:
    model, inputs = gpt2()
    model.set_attn_implementation("eager")
    model.train()
    model.transformer.h[1].register_forward_hook(
        lambda module, args, out: (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2
    )

    def run() -> tuple[Any, dict[str, Tensor]]:
        model.zero_grad()
        torch.manual_seed(3)
        output = model(**inputs, output_hidden_states=True, output_attentions=True)
        (output.loss + output.hidden_states[2].square().mean() + output.attentions[1].square().sum()).backward()
        return output, {name: p.grad.clone() for name, p in model.named_parameters()}

    before, expected = run()
    convert(model, "unchanged")
    after, actual = run()
    assert_same_bits(actual, expected)
    for kind in ("hidden_states", "attentions"):
        assert all(torch.equal(a, b) for a, b in zip(after[kind], before[kind], strict=True))


@pytest.mark.interop
def test_models_that_reversible_recipes_refuse_are_converted() -> None:
    """One layer called repeatedly, layers dropped at random, and a list in which the first layer computes a bias."""
    tf = pytest.importorskip("transformers")
    config = tf.AlbertConfig(
        vocab_size=64, embedding_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_hidden_groups=1, hidden_dropout_prob=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model, (_, inputs) = tf.AlbertForMaskedLM(config).train(), gpt2()
    expected = gradients(model, inputs)
    convert(model, "unchanged", layers="albert.encoder.albert_layer_groups", memory="checkpoint")
    assert_same_bits(gradients(model, inputs), expected)
    dropping, sound = Architecture("Wav2Vec2ForCTC", {**ARCHITECTURES["wav2vec2"].config, "layerdrop": 0.5}).make()
    sound = ARCHITECTURES["wav2vec2"].batch()
    dropping.train()
    expected = gradients(dropping, sound)
    convert(dropping, "unchanged")
    assert_same_bits(gradients(dropping, sound), expected)


class Normed(Layer):
    """Has running statistics, which a replay must not update a second time."""

    def __init__(self, width: int) -> None:
        super().__init__(width, dropout=0.2)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2), mask)


@pytest.mark.parametrize("memory", ["checkpoint", "selective", "offload"])
def test_buffers_are_updated_once(memory: Any) -> None:
    model = Model()
    model.layers = nn.ModuleList(Normed(8) for _ in range(4))
    model.train()
    twin = copy.deepcopy(model)
    convert(twin, "unchanged", memory=memory)
    for _ in range(3):
        assert_same_bits(gradients(twin, batch()), gradients(model, batch()))
        assert_same_bits(dict(twin.state_dict()), dict(model.state_dict()))


class Routed(Layer):
    """Routes positions by a comparison that its second run would decide otherwise."""

    flips = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x.mean(-1)
        choice = scores > 0
        if self.flips and rg.is_replaying():
            choice = ~choice  # as rounding flips it on a machine whose kernels are not deterministic
        choice = rg.decide(choice)
        return torch.where(choice.unsqueeze(-1), super().forward(x, mask), x)


def test_decisions_of_a_router_are_reused_in_the_recomputation() -> None:
    model = Model()
    model.layers = nn.ModuleList(Routed(8) for _ in range(4))
    expected = gradients(model.train(), batch())
    convert(model, "unchanged", memory="checkpoint")
    runs: list[nn.Module] = []
    for layer in model.layers:
        layer.flips = True  # type: ignore[assignment]
        layer.norm1.register_forward_hook(lambda module, *_: runs.append(module))
    assert_same_bits(gradients(model, batch()), expected)
    assert [runs.count(layer.norm1) for layer in model.layers] == [2] * 4, "each was recomputed"


def test_the_memory_is_that_of_the_saved_inputs_and_one_layer() -> None:
    def peak(model: nn.Module, inputs: dict[str, Any]) -> int:
        gradients(model, inputs)
        kept = [p.grad for p in model.parameters()]
        with MemoryTracker(ignore=[model, *inputs.values(), *kept]) as tracker:
            model(**inputs).square().mean().backward()
        return tracker.peak

    inputs, state = batch(16), 16 * 6 * 32 * 4
    models = [Model(depth, width=32).train() for depth in (4, 12)]
    stored = [peak(model, inputs) for model in models]
    for model in models:
        convert(model, "unchanged", memory="checkpoint")
    checkpointed = [peak(model, inputs) for model in models]
    assert checkpointed[1] - checkpointed[0] == 8 * state
    assert stored[1] - stored[0] > 5 * 8 * state


def test_a_budget_is_planned_and_kept() -> None:
    model, inputs = Model(8, width=32).train(), batch(32)
    stack = convert(model, "unchanged").stack
    stack.memory = "store"
    most = measured(model, inputs).peak
    stack.memory = "checkpoint"
    least = measured(model, inputs).peak
    planned = plan(model, inputs, (most + least) // 2)
    assert {"store", "checkpoint"} <= {str(mode) for mode in planned.plan.memory}
    stack.memory = planned.plan
    assert measured(model, inputs).peak <= (most + least) // 2


def test_the_report_says_that_nothing_changes() -> None:
    report = convert(Model(dropout=0.2), "unchanged", batch=batch()).report
    assert report is not None
    assert report.in_training == report.in_eval == "the original function, to the bit"
    assert report.logits_difference == report.gradient_difference == report.gradient_error == 0
    assert report.training_loss_before == report.training_loss_after
    assert report.side_bytes == 0
    assert report.peaks.keys() == {"original", "store", "checkpoint"}
    assert report.peaks["checkpoint"] < report.peaks["original"] == report.peaks["store"]


def test_copies_and_undo_work() -> None:
    model = Model().train()
    expected = gradients(model, batch())
    conversion = convert(model, "unchanged", memory="checkpoint")
    assert_same_bits(gradients(copy.deepcopy(model), batch()), expected)
    recipe = "Unchanged(save_ops='projections')"
    assert repr(conversion) == f"Conversion(Model, recipe={recipe}, layers='layers' (4), memory='checkpoint')"
    conversion.undo()
    assert_same_bits(gradients(model, batch()), expected)


def test_nothing_stays_alive_when_a_graph_is_dropped_without_a_backward_pass() -> None:
    model = Model().train()
    convert(model, "unchanged", memory="checkpoint")
    gradients(model, batch())
    gc.collect()
    gc.disable()
    try:
        output = model(**batch())
        seen = weakref.ref(output)
        del output
        assert seen() is None, "a cycle keeps the graph alive"
    finally:
        gc.enable()


def test_layers_may_return_anything_with_a_tensor_in_it_and_change_the_shape() -> None:
    class Halving(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            return {"states": super().forward(x)[:, ::2], "weights": x.softmax(-1)}

    class Pyramid(Model):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x, total = self.embed(x), 0
            for layer in self.layers:
                output = layer(x)
                x, total = output["states"], total + output["weights"].square().sum()
            return self.head(x) + total

    model = Pyramid(depth=3)
    model.layers = nn.ModuleList(Halving(8) for _ in range(3))
    expected = gradients(model.train(), batch())
    convert(model, "unchanged")
    assert_same_bits(gradients(model, batch()), expected)


@pytest.mark.interop
def test_selective_runs_attention_once_and_saves_its_result() -> None:
    model, inputs = gpt2(n_layer=6, attn_pdrop=0.0)  # otherwise attention is made of other operators
    del inputs["attention_mask"]
    model.train()
    stack = convert(model, "unchanged", memory="selective").stack
    assert str(stack.memory) == "blocks 0-5 selective checkpoint"
    runs = {}
    for memory in ("selective", "checkpoint"):
        stack.memory = memory
        gradients(model, inputs)
        with Counter() as counter:
            gradients(model, inputs)
        runs[memory] = counter.runs
    assert runs == {"selective": 6, "checkpoint": 12}


class Counter(TorchDispatchMode):
    """Counts the runs of attention, or of other operators by a part of their name."""

    runs = 0

    def __init__(self, part: str = "attention") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        self.runs += self.part in name and "backward" not in name
        return operator(*args, **kwargs or {})


def test_selective_repeats_no_projection() -> None:
    model, inputs = gpt2(n_layer=6)
    model.train()
    stack = convert(model, "unchanged").stack
    runs = {}
    for memory in ("store", "selective", "checkpoint"):
        stack.memory = memory
        gradients(model, inputs)
        with Counter("aten.addmm.") as counter:  # the four projections of a layer
            gradients(model, inputs)
        runs[memory] = counter.runs
    assert runs == {"store": 24, "selective": 24, "checkpoint": 48}


def test_a_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="grid_bits=12 is for exact stacks"):
        convert(Model(), "unchanged", grid_bits=12)
    assert not convert(Model(), recipes.Unchanged()).stack.exact


def test_the_modules_of_a_layer_are_looked_through_once_and_not_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    take = step_cache.ModuleSnapshot

    def noted(*given: Any) -> Any:
        taken.append(given)
        return take(*given)

    monkeypatch.setattr(step_cache, "ModuleSnapshot", noted)
    model = Model(dropout=0.3).train()
    layers = len(convert(model, "unchanged", memory="checkpoint").stack)
    for _ in range(4):
        gradients(model, batch())
    assert len(taken) == layers
