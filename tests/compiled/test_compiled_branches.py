"""Branches that are compiled one by one, inside of a stack that is not: the recommended way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, WIDTH, Graphs, Mlp, assert_close, gradients

pytestmark = QUIET


def test_changing_lengths_compile_a_branch_twice_and_replays_compile_nothing() -> None:
    """Once for the first length, once for any length. The replay meets what the first run met."""
    graphs, branch = Graphs(), Mlp()
    compiled = torch.compile(branch, backend=graphs)
    stack = rg.ReversibleSequence([rg.two_stream(compiled, compiled) for _ in range(3)])
    eager = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(3)])
    leaves = list(branch.parameters())
    for length in (4, 6, 9, 5, 12):
        x = torch.randn(2, length, WIDTH, requires_grad=True)  # as the later streams do
        assert_close(gradients(stack, x, leaves), gradients(eager, x, leaves), 1e-5)  # type: ignore[arg-type]
    assert graphs.count == 2


@pytest.mark.parametrize("way", ["torch.compile(branch)", "branch.compile()"])
def test_branches_of_one_class_share_two_graphs_at_any_depth_and_length(way: str) -> None:
    """Weights are inputs of a graph. One for each branch would pass the compiler's limit, and the rest run eagerly."""
    graphs, branches = Graphs(), [Mlp() for _ in range(24)]
    eager = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)])
    leaves = list(eager.parameters())
    inputs = [torch.randn(2, length, WIDTH, requires_grad=True) for length in (4, 6, 9, 5)]
    wanted = [gradients(eager, x, leaves) for x in inputs]  # type: ignore[arg-type]
    if way == "branch.compile()":
        for branch in branches:
            branch.compile(backend=graphs)
        stack = eager
    else:
        compiled = [torch.compile(branch, backend=graphs) for branch in branches]
        pairs = zip(compiled[::2], compiled[1::2], strict=True)
        stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs])
    for x, expected in zip(inputs, wanted, strict=True):
        assert_close(gradients(stack, x, leaves), expected, 1e-4)  # type: ignore[arg-type]
    assert graphs.count == 2


def test_hooks_of_the_tape_are_not_compiled() -> None:
    """torch 2.13 compiles no nn.Sequential in place, but would compile what Python runs inside of one."""
    graphs = Graphs()
    branches = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)])
    x, leaves = torch.randn(4, WIDTH, requires_grad=True), list(stack.parameters())
    wanted = gradients(stack, x, leaves)  # type: ignore[arg-type]
    for branch in branches:
        branch.compile(backend=graphs)
    assert_close(gradients(stack, x, leaves), wanted, 1e-5)  # type: ignore[arg-type]
    assert graphs.count <= 1  # torch 2.15 compiles the Sequential itself


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_dropout_in_a_compiled_branch_is_replayed_with_its_mask(memory: str) -> None:
    """The generated code draws its own seeds from torch's generator, and they are replayed like any draw."""
    branch = torch.compile(Mlp(dropout=0.4))
    stack = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(2)])
    x, leaves = torch.randn(6, WIDTH, requires_grad=True), list(stack.parameters())

    def with_memory(memory: str) -> list[Tensor]:
        return gradients(lambda x: stack(x, memory=memory), x, leaves)  # type: ignore[arg-type,return-value]

    stored = with_memory("store")
    assert_close(with_memory(memory), stored, 1e-4)
    torch.manual_seed(4)
    other = stack(x)
    assert isinstance(other, Tensor)
    assert not torch.allclose(other, stored[0])  # so there was dropout


def test_a_graph_of_compiled_branches_may_be_retained_and_walked_twice() -> None:
    """Donated buffers, which a second walk would find overwritten, belong to a replay, not to the graph."""
    branch = torch.compile(Mlp())
    stack = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(3)])
    y = stack(torch.randn(6, WIDTH, requires_grad=True))
    assert isinstance(y, Tensor)
    leaves = list(stack.parameters())
    once = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), leaves)
    assert_close(list(again), list(once), 1e-4)


def two_lengths(dropout: float = 0.0, *, exact: bool = True, **options: Any) -> list[Tensor]:
    """The gradients of two calls with different lengths before one backward pass, with compiled branches."""
    torch.manual_seed(0)
    branch = torch.compile(Mlp(dropout), backend="eager", **options)
    stack = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(2)], exact=exact)
    first, second = (stack(torch.randn(2, length, WIDTH, requires_grad=True)) for length in (4, 6))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return list(torch.autograd.grad(first.sum() + second.sum(), list(stack.parameters())))


def test_an_exact_stack_says_when_a_replay_runs_another_compiled_graph() -> None:
    """The second length made a graph for any length, which the replay of the first call runs, with other rounding."""
    with pytest.raises(RuntimeError, match=r"(?s)in block 1 ran another compiled graph.*dynamic=True"):
        two_lengths()
    two_lengths(exact=False)  # no more than rounding
    two_lengths(dynamic=True)  # the remedy


def attend(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


class Holding(nn.Module):
    """A branch that is not compiled, with a part of it that is."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(self.mix(x))
        return out


ATTEND = torch.compile(attend, backend="eager")


def named(x: Tensor) -> Tensor:
    out: Tensor = ATTEND(x)
    return out


class Naming(nn.Module):
    """The same, but the part is a global, as compiled attention often is."""

    def forward(self, x: Tensor) -> Tensor:
        return named(x)


def compiled_in_place() -> nn.Module:
    part = Mlp()
    part.compile(backend="eager")
    return part


def branch_with(part: str) -> Any:
    if part == "a global":
        return Naming()
    if part == "the branch, a function":
        return torch.compile(attend, backend="eager")
    if part == "a function that a function calls":
        return lambda x: named(x)
    made = {
        "a module": lambda: torch.compile(Mlp(), backend="eager"),
        "a module, in place": compiled_in_place,
        "an attribute": lambda: torch.compile(attend, backend="eager"),
        "a module below": lambda: nn.Sequential(torch.compile(Mlp(), backend="eager"), nn.Tanh()),
    }
    return Holding(made[part]())


PARTS = ["a module", "a module, in place", "an attribute", "a module below", "a global", "the branch, a function",
         "a function that a function calls"]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_an_exact_stack_sees_compiled_parts_inside_a_branch(part: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    branch = branch_with(part)
    stack = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(2)], exact=True)
    calls = [torch.randn(2, length, WIDTH, requires_grad=True) for length in (4, 6)]
    first, second = (stack(x).sum() for x in calls)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"(?s)in block \d ran another compiled graph.*dynamic=True"):
        torch.autograd.grad(first + second, calls)
    for x in calls:
        torch.autograd.grad(stack(x).sum(), x)  # type: ignore[union-attr]  # one call at a time is right
