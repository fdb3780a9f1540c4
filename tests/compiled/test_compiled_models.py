"""A model that is compiled as a whole, with a stack in it; and an exported one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, WIDTH, Graphs, Mlp, Model, assert_close, breaks, gradients
from retrograde.engine.torch_internals import VERSION

pytestmark = QUIET


class Watched(Mlp):
    """Notes for each of its runs whether it was a replay."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.replays: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.replays.append(rg.is_replaying())
        return super().forward(x)


def test_a_compiled_model_breaks_its_graph_at_the_stack_alone_and_trains_reversibly() -> None:
    """A graph before the stack, one that merges its streams, one after it; a tape cannot be traced."""
    branches = [Watched() for _ in range(4)]
    model = Model([rg.two_stream(*branches[:2]), rg.two_stream(*branches[2:])])
    x, leaves, graphs = torch.randn(6, WIDTH), list(model.parameters()), Graphs()
    wanted = gradients(model, x, leaves)
    for branch in branches:
        branch.replays.clear()
    assert_close(gradients(torch.compile(model, backend=graphs), x, leaves), wanted, 1e-5)
    assert graphs.count == 3
    (why,) = breaks()  # one cause; the compiler meets it again in every frame between the model and the stack's driver
    assert "torch.compiler.disable" in why
    assert "recomputes activations when autograd asks for them" in why  # the compiler's log explains it
    assert [branch.replays for branch in branches] == [[False, True]] * 3 + [[False]]  # the last keeps its graph


STRICT = pytest.param(True, marks=pytest.mark.skipif(VERSION < (2, 11), reason="needs torch 2.11"))


@pytest.mark.parametrize("strict", [False, STRICT])
def test_an_exported_model_computes_what_the_model_does_at_any_batch_size(strict: bool) -> None:
    model = Model([rg.two_stream(Mlp(0.3), nn.Sequential(Mlp(), nn.BatchNorm1d(WIDTH))) for _ in range(2)]).eval()
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(model, (torch.randn(4, WIDTH),), dynamic_shapes=({0: batch},), strict=strict)
    x = torch.randn(7, WIDTH)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_model_without_gradients_is_one_graph(mode: type) -> None:
    """Nothing is recorded there, so nothing keeps the stack out of the graph."""
    model = Model([rg.two_stream(Mlp(0.3), nn.Sequential(Mlp(), nn.BatchNorm1d(WIDTH))) for _ in range(2)]).eval()
    graphs, x = Graphs(), torch.randn(4, WIDTH)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert graphs.count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_exact_stack_without_gradients_is_one_graph_that_still_checks_its_range(mode: type) -> None:
    model = Model([rg.two_stream(Mlp(), Mlp()) for _ in range(3)], exact=True).eval()
    graphs, x = Graphs(), torch.randn(4, WIDTH)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
        assert graphs.count == 1
        with pytest.raises(RuntimeError, match="left the range of its grid"):
            compiled(torch.full((4, WIDTH), 1e9))
