"""A stack with compiled="single graph": the reversible backward pass inside of the model's one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, WIDTH, Graphs, Mlp, Model, assert_close, breaks, gradients

pytestmark = QUIET

Affine = rg.couplings.Affine


def mixed_blocks() -> list[rg.Block]:
    """A tied branch, a frozen weight, three couplings, a branch without parameters, streams that swap."""
    tied, frozen = Mlp(), Mlp()
    frozen.inner.weight.requires_grad_(False)
    return [
        rg.two_stream(tied, Mlp()),
        rg.two_stream(tied, torch.tanh),
        rg.two_stream(Mlp(out=2 * WIDTH), Mlp(out=2 * WIDTH), coupling=Affine(limit=1.0)),
        rg.midpoint(frozen, step=0.1),
        rg.momentum(Mlp()),
    ]


def in_one_graph(blocks: list[rg.Block], **options: Any) -> Model:
    return Model(blocks, compiled="single graph", **options)


def test_one_graph_gives_the_gradients_of_the_tape() -> None:
    model = in_one_graph(mixed_blocks()).double()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for seed in range(2):
        x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
        shift = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
        leaves = [x, shift, *(p for p in model.parameters() if p.requires_grad)]
        wanted = gradients(model, x, leaves, shift=shift, factor=0.5)
        assert_close(gradients(compiled, x, leaves, shift=shift, factor=0.5), wanted, 1e-10)
        assert seed == 0 or graphs.count == 1  # other tensors, the same graph
    assert not breaks()


def test_generated_code_gives_the_gradients_of_the_tape() -> None:
    model = in_one_graph([rg.two_stream(Mlp(), Mlp())])
    x, leaves = torch.randn(6, WIDTH), list(model.parameters())
    wanted = gradients(model, x, leaves)
    assert_close(gradients(torch.compile(model, fullgraph=True), x, leaves), wanted, 1e-4)


def kept(y: Tensor, *but: Tensor) -> int:
    """The bytes that the graph of a result keeps, but for some tensors."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in but}
    found, seen, todo = {}, set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        for tensor in getattr(node, "saved_tensors", ()):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ignored:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_one_graph_keeps_the_same_for_any_depth() -> None:
    """Left to itself, the compiler would recompute in the forward pass and keep everything: plain autograd does."""

    def kept_at(depth: int, memory: str) -> int:
        torch.compiler.reset()
        stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(depth)], compiled="single graph")
        pairs = [[step.branch for step in block.each_step()] for block in stack.blocks]  # type: ignore[operator,union-attr]

        def plain(x: Tensor) -> Tensor:
            first = second = x
            for f, g in pairs:
                first = first + f(second)
                second = second + g(first)
            return first + second

        run: Callable[..., Any] = plain if memory == "store" else stack
        x = torch.randn(64, WIDTH, requires_grad=True)
        y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        return kept(y, x, *stack.parameters())

    assert kept_at(3, "reverse") == kept_at(1, "reverse") > 0
    assert kept_at(3, "store") > 2 * kept_at(1, "store")


class Hidden(Mlp):
    """Draws where nobody can see it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(super().forward(x), 0.2)


def test_a_draw_that_nobody_could_see_is_an_error_in_the_backward_pass() -> None:
    model = in_one_graph([rg.two_stream(Hidden(), Hidden())])
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(6, WIDTH))
    with pytest.raises(RuntimeError, match=r"ended with other streams than its forward pass began with.*F.dropout"):
        y.sum().backward()


def hooked() -> Mlp:
    branch = Mlp()
    branch.inner.register_forward_hook(lambda *_: None)
    return branch


def loose() -> Mlp:
    branch = Mlp()
    branch.others = [Mlp()]  # type: ignore[assignment]
    return branch


BATCH = nn.BatchNorm1d(WIDTH)
REFUSED = {
    "dropout": (lambda: rg.two_stream(Mlp(0.3), Mlp()), "block 0, Mlp: its Dropout draws random numbers in training"),
    "buffers": (lambda: rg.two_stream(nn.Sequential(Mlp(), BATCH), Mlp()), "it has the buffer 1.running_mean"),
    "hooks": (lambda: rg.two_stream(hooked(), Mlp()), "its Linear has hooks"),
    "function": (lambda: rg.two_stream(lambda x: BATCH(x), Mlp()), "it is a function"),
    "unregistered": (lambda: rg.two_stream(loose(), Mlp()), "holds others, which is not registered"),
    "coupling": (lambda: rg.two_stream(Mlp(), Mlp(), coupling=rg.couplings.Exact()), "not Exact"),
    "aux": (lambda: rg.two_stream(Mlp(), lambda x: (x.sin(), x.sum()), aux="g"), "it returns an auxiliary loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_graph_cannot_hold_is_refused_with_its_reason(name: str) -> None:
    make, why = REFUSED[name]
    stack = rg.ReversibleSequence([make()], compiled="single graph")
    assert why in (stack.single_graph_refusal() or "nothing")


def test_a_refused_stack_runs_outside_of_the_graph_and_goes_in_when_it_may() -> None:
    """Dropout is refused in training alone."""
    model = in_one_graph([rg.two_stream(Mlp(0.3), Mlp(0.3))])
    x, leaves = torch.randn(6, WIDTH), list(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(gradients(compiled, x, leaves), gradients(model, x, leaves), 1e-5)
    assert breaks()
    breaks().clear()
    model.eval()
    assert model.stack.single_graph_refusal() is None
    assert_close(gradients(compiled, x, leaves), gradients(model, x, leaves), 1e-5)
    assert not breaks()
