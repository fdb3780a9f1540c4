"""Converted models under torch.compile: parts of their layers compiled, and the model as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, Graphs
from retrograde.engine.torch_internals import VERSION
from small_models import Model, assert_same_bits, bert, gpt2, gradients, llama

pytestmark = QUIET

needs_our_backend = pytest.mark.skipif(VERSION < (2, 13), reason='backend="retrograde" needs torch 2.13')


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def plain() -> tuple[nn.Module, dict[str, Tensor]]:
    return Model(dropout=0.2), {"x": torch.randn(3, 6, 3), "mask": torch.ones(6, 6, dtype=torch.bool).tril()}


def replays(stack: Any) -> list[bool]:
    """Filled with one entry per run of a feed-forward: whether it was a replay."""
    seen: list[bool] = []
    for original in stack.originals:
        original.layer.mlp.register_forward_pre_hook(lambda *_: seen.append(rg.is_replaying()))
    return seen


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (plain, ["attn"]),
        pytest.param(gpt2, ["attn", "mlp"], marks=pytest.mark.interop),
        pytest.param(llama, ["self_attn", "mlp"], marks=pytest.mark.interop),
    ],
)
@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
def test_all_layers_and_their_replays_share_the_compiled_parts(
    make: Callable[[], Any], parts: list[str], recipe: str
) -> None:
    model, batch = make()
    stack = rg.convert(model.train(), recipe).stack
    expected, graphs = gradients(model, batch), Graphs()
    for original in stack.originals:
        for part in parts:
            getattr(original.layer, part).compile(backend=graphs)
    assert_same_bits(gradients(model, batch), expected)
    assert graphs.count == len(parts), "one for the attentions and one for the feed-forwards"


@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
def test_a_model_compiled_as_a_whole_breaks_its_graph_at_the_layers_and_trains_reversibly(recipe: str) -> None:
    from torch._dynamo.utils import counters

    model, batch = plain()
    stack = rg.convert(model.train(), recipe).stack
    expected, graphs, seen = gradients(model, batch), Graphs(), replays(stack)
    compiled = gradients(torch.compile(model, backend=graphs), batch)
    assert_same_bits({name.removeprefix("_orig_mod."): g for name, g in compiled.items()}, expected)
    assert graphs.count <= 4
    (why,) = counters["graph_break"]  # one cause, met in every frame between the model and the last layer
    assert "ConvertedStack._run_outside" in why
    assert seen.count(True) >= len(stack.originals) - 1, "the layers were recomputed, not stored"


IN_GRAPH = [
    (gpt2, "unchanged", {}),
    (gpt2, "unchanged", {"memory": "selective"}),
    (gpt2, "two_stream", {"exact": False}),
    (gpt2, "momentum", {"exact": False}),
    (gpt2, "bdia", {}),
    (llama, "unchanged", {}),
    (llama, "two_stream", {}),
    (bert, "unchanged", {}),
    (bert, "two_stream", {}),
]


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
    return model.train()


@pytest.fixture(name="_float64")
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@needs_our_backend
@pytest.mark.interop
@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(("make", "recipe", "options"), IN_GRAPH)
def test_our_backend_takes_the_converted_layers_into_its_graph(
    make: Callable[[], Any], recipe: str, options: dict[str, Any]
) -> None:
    """With the gradients of the eager model; graphs break where transformers logs something, and nowhere else."""
    from torch._dynamo.utils import counters

    from compiling import ByRule

    torch.manual_seed(0)
    model, batch = make()
    stack = rg.convert(without_dropout(model), recipe, **options).stack
    stack.overflow = "raise"
    expected, backend = gradients(model, batch), ByRule()
    compiled = gradients(torch.compile(model, backend=backend), batch)
    assert not [why for why in counters["graph_break"] if "logging" not in why]
    for (name, wanted), found in zip(expected.items(), compiled.values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max().item(), msg=name)


@needs_our_backend
def test_a_converted_model_that_may_rescale_its_grid_stays_on_its_tape_and_says_so() -> None:
    from compiling import ByRule

    model, batch = plain()
    rg.convert(model.train(), "bdia")
    expected = gradients(model, batch)
    with pytest.warns(RuntimeWarning, match="overflow='rescale' runs a call again"):
        compiled = gradients(torch.compile(model, backend=ByRule()), batch)
    assert_same_bits({name.removeprefix("_orig_mod."): g for name, g in compiled.items()}, expected)


def test_bdia_in_eval_is_one_graph() -> None:
    model, batch = plain()
    rg.convert(model.eval(), "bdia")
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(**batch), model(**batch))
