"""Small models to compile, and what can be counted of a compiler at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.compiled.backend import Backend, partition
from retrograde.engine.graph_marks import is_mark

WIDTH = 8

QUIET = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.* is deprecated:DeprecationWarning",  # torch's own, when it loads its compiler
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the tracer looks at every attribute
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",  # the tracer does
)


class Mlp(nn.Module):
    """Linear, tanh, dropout, linear; shifted and scaled by context where it is given."""

    def __init__(self, dropout: float = 0.0, out: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 12), nn.Linear(12, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Tensor:
        h = torch.tanh(self.inner(x if shift is None else x + shift))
        update: Tensor = self.outer(self.dropout(h)) * factor
        return update


class Attention(nn.Module):
    """Its query, key and value are parts of one projection: tensors that begin in the middle of their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).chunk(3, -1)
        update: Tensor = self.out(nn.functional.scaled_dot_product_attention(*parts, is_causal=True))
        return update


class Model(nn.Module):
    """A stack between two layers, so that there is something to compile on both sides of it."""

    def __init__(self, blocks: Sequence[rg.Block], **options: Any) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stack = rg.ReversibleSequence(blocks, **options)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        y: Tensor = self.leave(self.stack(self.enter(x), **context)).sin()
        return y


class Graphs:
    """A backend that counts the graphs it is given, and runs them without a code generator."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


class ByRule(Backend):
    """The backend "retrograde" without a code generator: the graphs that the rule cuts are run as they are.

    Attributes:
        graphs: how many graphs were compiled.
        saved: for each graph that was cut (a region, or the graph around them), the bytes that its forward half saves
            besides its inputs.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.saved: list[int] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def compile(self, module: Any, inputs: Any, **options: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def run(graph: Any, _: Any) -> Any:
            assert not any(is_mark(node) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        compiled = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=self.cut)(module, inputs)
        self.graphs += 1
        return compiled

    def cut(self, module: Any, inputs: Any, **options: Any) -> Any:
        forward, backward = partition(module, inputs, **options)
        (output,) = forward.graph.find_nodes(op="output")
        saved = [n.meta["val"] for n in output.args[0][options["num_fwd_outputs"] :] if n.op != "placeholder"]
        self.saved.append(sum(v.numel() * v.element_size() for v in saved if isinstance(v, Tensor)))
        return forward, backward


def breaks() -> Counter[str]:
    """Why graphs were broken since the last reset, and how often."""
    from torch._dynamo.utils import counters

    return counters["graph_break"]


def gradients(run: Callable[..., Tensor], x: Tensor, leaves: Sequence[Tensor], **context: Any) -> list[Tensor]:
    """The output and the gradients of some leaves, with the generator started anew."""
    torch.manual_seed(3)
    y = run(x, **context)
    return [y.detach(), *torch.autograd.grad((y.sin() * y).sum(), list(leaves))]


def assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    """Equal to a relative error, measured against the largest entry."""
    assert len(found) == len(wanted) > 1
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error, scale = (a - b).abs().max().item(), b.abs().max().item()
        assert error <= tolerance * scale, f"entry {i}: off by {error:.3g}, where the largest entry is {scale:.3g}"
