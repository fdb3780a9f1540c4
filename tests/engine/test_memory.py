"""Memory: what a stack holds after its forward pass, its peak in the backward pass, and that nothing stays behind.

Bytes are counted exactly, by `retrograde.measure.MemoryTracker`, on two-stream blocks of pre-norm SDPA attention and
a GELU MLP in float32. Parameters and inputs were there before and do not count; a parameter's gradient is dropped as
soon as it is complete, as a fused optimiser does. S are the bytes of one pair of streams.
"""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from measured import (
    SHAPE,
    STREAM,
    Attention,
    FeedForward,
    Measured,
    S,
    dropping_gradients,
    live_tapes,
    loss_of,
    measure,
    stack,
)
from retrograde.measure import MemoryTracker


@functools.cache
def of_stack(depth: int, memory: Any = "reverse", dropout: float = 0.0) -> Measured:
    return measure(stack(depth, memory, dropout=dropout))


@functools.cache
def lower_bound() -> int:
    """Two streams, their gradients, and the graph of the larger branch, run alone in plain autograd.

    The branch's output is dropped before its backward pass: nothing there needs it.
    """
    peaks = []
    for branch in (Attention(), FeedForward()):
        dropping_gradients(branch)
        with MemoryTracker() as memory:
            streams = [torch.randn(SHAPE), torch.randn(SHAPE, requires_grad=True)]
            gradients = [torch.randn(SHAPE), torch.randn(SHAPE)]
            end = torch.autograd.graph.get_gradient_edge(branch(streams[1]))
            torch.autograd.backward([end], [gradients[0]])
        assert memory.live == 5 * STREAM  # the branch's gradient for its source is the fifth
        peaks.append(memory.peak)
    return max(peaks)


@contextmanager
def without_the_cycle_collector() -> Iterator[None]:
    """Memory that only the collector can free counts as leaked."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# What a stack holds


def test_the_bytes_live_after_forward_are_the_same_at_any_depth() -> None:
    assert of_stack(512).held == of_stack(4).held
    assert of_stack(512).forward_peak == of_stack(4).forward_peak
    assert of_stack(8, "store").held >= 1.9 * of_stack(4, "store").held > 5 * of_stack(4).held


def test_what_is_live_after_forward_is_the_streams_and_the_last_step() -> None:
    """The last streams, and the graph of the last step, which the backward pass begins with (rules 2 and 5)."""
    x, branch = torch.randn(SHAPE, requires_grad=True), FeedForward()
    with MemoryTracker() as last_step:
        end = torch.autograd.graph.get_gradient_edge(branch(x))  # the output itself is dropped
    assert end.node is not None
    assert 0 <= of_stack(4).held - last_step.live - S < 64  # the loss


def test_dropout_holds_no_tensor_bytes_at_any_depth() -> None:
    assert of_stack(64, dropout=0.1).held == of_stack(4, dropout=0.1).held
    more = of_stack(8, "store", dropout=0.1).held - of_stack(8, "store").held
    assert more >= 16 * STREAM // 4  # stored, each step's mask is held


def python_bytes_held(depth: int, dropout: float) -> int:
    """What the interpreter holds after a forward pass, records and generators' states included."""
    model, x = stack(depth, dropout=dropout), torch.randn(SHAPE)
    model(x)  # what is learned of a branch once is not counted
    gc.collect()
    tracemalloc.start(1)
    try:
        output = model(x)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        assert output.requires_grad
    finally:
        tracemalloc.stop()
    return held


def test_dropout_costs_at_most_two_states_of_the_generator_a_step() -> None:
    """The states are kept as bytes of Python, which are no tensor storage: the one cost that grows with depth."""
    state = torch.get_rng_state().numel()
    steps = 2 * (24 - 8)
    plain = python_bytes_held(24, 0.0) - python_bytes_held(8, 0.0)
    noisy = python_bytes_held(24, 0.1) - python_bytes_held(8, 0.1)
    assert steps * state / 2 < noisy - plain <= steps * (2 * state + 512)
    assert plain <= steps * 8192


def test_an_anchor_costs_exactly_the_streams() -> None:
    for anchors in ({4}, {2, 4, 6}, {1, 2, 3, 4, 5, 6}):  # one before the last block would share a stream with it
        plan = rg.Plan(("reverse",) * 8, anchors=frozenset(anchors))
        assert of_stack(8, plan).held == of_stack(8).held + len(anchors) * S
        deep = rg.Plan(("reverse",) * 64, anchors=frozenset(anchors))
        assert of_stack(64, deep).held == of_stack(8, plan).held
        assert of_stack(64, deep).backward_peak <= of_stack(64).backward_peak + len(anchors) * S


def test_a_checkpointed_block_costs_exactly_its_input() -> None:
    assert of_stack(9, "checkpoint").held == of_stack(8, "checkpoint").held + S
    assert of_stack(24, "checkpoint").held == of_stack(8, "checkpoint").held + 16 * S
    assert of_stack(24, "store").held > of_stack(8, "store").held + 16 * 6 * S


def test_a_plan_holds_what_its_parts_hold() -> None:
    mixed = of_stack(12, ("reverse",) * 4 + ("checkpoint",) * 4 + ("reverse",) * 4).held
    assert mixed == of_stack(12).held + 4 * S  # before each checkpointed block; the first is the reversed part's end
    assert mixed < of_stack(12, "store").held / 4


# The peak in the backward pass


def test_the_peak_of_the_backward_pass_does_not_grow_with_depth() -> None:
    shallow, deep = of_stack(4).backward_peak, of_stack(512).backward_peak
    assert abs(deep - shallow) <= 0.01 * shallow
    assert of_stack(8, "store").backward_peak >= 1.8 * of_stack(4, "store").backward_peak


@pytest.mark.parametrize("depth", [4, 512])
def test_the_peak_is_the_streams_their_gradients_and_one_branch(depth: int) -> None:
    peak, bound = of_stack(depth).backward_peak, lower_bound()
    assert peak <= 1.05 * bound, f"peak {peak / S:.3f} S, lower bound {bound / S:.3f} S"
    assert of_stack(4, "store").backward_peak > 3 * bound


def test_the_peak_with_dropout_is_as_flat() -> None:
    shallow, deep = of_stack(4, dropout=0.1).backward_peak, of_stack(64, dropout=0.1).backward_peak
    assert abs(deep - shallow) <= 0.01 * shallow


def test_a_graph_that_is_retained_holds_no_more_at_depth() -> None:
    def retained(depth: int) -> tuple[int, ...]:
        model, x = stack(depth), torch.randn(SHAPE, requires_grad=True)
        with MemoryTracker(ignore=[model, x]) as memory:
            loss = loss_of(model, x)
            with memory.phase("first") as first:
                loss.backward(retain_graph=True)
            x.grad = None
            kept = memory.live
            with memory.phase("second") as second:
                loss.backward()
            x.grad = None
            del loss
        assert memory.live == 0
        return kept, first.peak, second.peak

    assert retained(32) == retained(4)
    assert max(retained(4)) < of_stack(4).held + lower_bound() + S


# Nothing stays behind


def iterations(model: nn.Module, count: int, step: Callable[[Tensor, Tensor], None]) -> list[tuple[int, int]]:
    """For each iteration: its peak, and what is live after it."""
    x = torch.randn(SHAPE, requires_grad=True)
    seen, before = [], live_tapes()
    with MemoryTracker(ignore=[model, x]) as memory, without_the_cycle_collector():
        for _ in range(count):
            with memory.phase("iteration") as iteration:
                step(loss_of(model, x), x)
                x.grad = None
            seen.append((iteration.peak, memory.live))
        assert live_tapes() <= before
    return seen


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_is_left_after_any_of_20_iterations(memory: str, dropout: float) -> None:
    seen = iterations(stack(4, memory, dropout=dropout), 20, lambda loss, x: loss.backward())
    assert seen == [(seen[0][0], 0)] * 20


def one_gradient_after_another(loss: Tensor, x: Tensor) -> None:
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("step", [lambda loss, x: torch.autograd.grad(loss, x), one_gradient_after_another])
def test_a_backward_pass_that_asks_for_some_of_the_saved_tensors_leaves_nothing(memory: str, step: Any) -> None:
    seen = iterations(stack(4, memory), 5, step)
    assert seen == [(seen[0][0], 0)] * 5


def test_a_graph_that_is_dropped_without_a_backward_pass_leaves_nothing() -> None:
    seen = iterations(stack(4), 3, lambda loss, x: None)
    assert [left for _, left in seen] == [0, 0, 0]


def test_a_backward_pass_that_fails_half_way_leaves_nothing() -> None:
    class HalfWayError(Exception):
        pass

    def stop(gradient: Tensor) -> None:
        stops.append(gradient.shape)
        raise HalfWayError

    def fail(loss: Tensor, x: Tensor) -> None:
        with suppress(HalfWayError):
            loss.backward()
        torch.ones((), requires_grad=True).backward()  # autograd itself keeps a graph that failed until it runs again

    stops: list[torch.Size] = []
    model = stack(6)
    next(model.blocks[3].parameters()).register_hook(stop)
    seen = iterations(model, 3, fail)
    assert [left for _, left in seen] == [0, 0, 0]
    assert len(stops) == 3


def test_after_the_backward_pass_only_the_outputs_are_left() -> None:
    model, x = stack(6), torch.randn(SHAPE, requires_grad=True)
    with MemoryTracker(ignore=[model, x]) as memory, without_the_cycle_collector():
        outputs = model.run(x)
        torch.autograd.backward(tuple(outputs), tuple(torch.ones(SHAPE) for _ in outputs))
        x.grad = None
        assert memory.live == S
        del outputs
        assert memory.live == 0


# Stacks inside other things


class Inner(nn.Module):
    """A branch that is itself a stack."""

    def __init__(self, depth: int, memory: str = "reverse") -> None:
        super().__init__()
        self.stack = stack(depth, memory)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)


def nested(depth: int, inner: int, memory: str = "reverse") -> Measured:
    blocks = [rg.two_stream(Inner(inner), FeedForward()) for _ in range(depth)]
    return measure(dropping_gradients(rg.ReversibleSequence(blocks, memory=memory)))


def test_a_stack_inside_a_branch_holds_nothing_for_each_outer_step() -> None:
    small = nested(2, 2)
    assert nested(12, 2) == small
    assert nested(2, 12) == small
    assert nested(12, 2, "store").held > 5 * nested(2, 2, "store").held


class InTorchCheckpoints(nn.Module):
    """Stacks one after another, each within `torch.utils.checkpoint`, or bare."""

    def __init__(self, count: int, depth: int, reentrant: bool | None) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(Inner(depth) for _ in range(count))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.stacks:
            x = inner(x) if self.reentrant is None else checkpoint(inner, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_stack_within_torch_checkpoint_holds_only_its_input(reentrant: bool) -> None:
    few, many = measure(InTorchCheckpoints(2, 3, reentrant)), measure(InTorchCheckpoints(6, 3, reentrant))
    assert many.held - few.held == 4 * STREAM  # the input of a call; streams would be twice that
    assert measure(InTorchCheckpoints(2, 12, reentrant)) == few
    bare = measure(InTorchCheckpoints(6, 3, None)).held - measure(InTorchCheckpoints(2, 3, None)).held
    assert bare > 4 * S
