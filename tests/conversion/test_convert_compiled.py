"""Converted models under torch.compile: parts of their layers compiled, and the model as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from small_models import Model, assert_same_bits, gpt2, gradients, llama

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.* is deprecated:DeprecationWarning",  # torch's own, when it loads its compiler
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the tracer looks at every attribute
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",  # the tracer does
)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that counts its graphs and runs them without a code generator: bit-identical to eager."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


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
    assert "ConvertedStack.finish" in why
    assert seen.count(True) >= len(stack.originals) - 1, "the layers were recomputed, not stored"


def test_bdia_in_eval_is_one_graph() -> None:
    model, batch = plain()
    rg.convert(model.eval(), "bdia")
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(**batch), model(**batch))
