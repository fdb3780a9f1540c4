"""drift=: anchors where they are needed, and nowhere else."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from bits import as_stored, digest, loss_of, mlp
from retrograde.engine.drift import relative_error

DEPTH = 20


def scaled(keep: float, depth: int = DEPTH, **options: Any) -> rg.ReversibleSequence:
    """A stack whose inverse magnifies rounding by 1 / keep a step."""
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(keep)
    return rg.ReversibleSequence([rg.two_stream(mlp(), mlp(), coupling=coupling) for _ in range(depth)], **options)


class Seen:
    """Notes how far the recomputed streams before a block are from the true ones."""

    def __init__(self, block: int, streams: tuple[Tensor, ...], errors: dict[int, float]) -> None:
        self.block, self.errors = block, errors
        self.true = [s.detach().clone() for s in streams]

    def recomputed(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.errors[self.block] = max(relative_error(s, t) for s, t in zip(streams, self.true, strict=True))
        return streams


class Seeing(rg.Observer):
    def __init__(self, errors: dict[int, float]) -> None:
        self._errors = errors

    def on_block(self, block: int, streams: tuple[Tensor, ...]) -> Seen:
        return Seen(block, streams, self._errors)


def errors_of(stack: rg.ReversibleSequence, plan: rg.Plan, x: Tensor) -> dict[int, float]:
    """The error of every block's input that a backward pass recomputes, under a plan."""
    errors: dict[int, float] = {}
    with stack.observed_by(Seeing(errors)):
        streams = stack.run((x.clone().requires_grad_(),) * 2, memory=plan)
    loss_of(torch.cat(tuple(streams))).backward()
    return errors


@pytest.mark.parametrize(("keep", "tolerance"), [(0.5, 1e-5), (0.1, 1e-4), (0.1, 1e-3), (0.03, 1e-3)])
def test_no_recomputed_stream_is_further_off_than_the_tolerance(keep: float, tolerance: float) -> None:
    x = torch.randn(4, 16)
    stack = scaled(keep, max_drift=tolerance)
    stack(x)
    assert 0 < len(stack.memory.anchors) < DEPTH
    assert max(errors_of(stack, stack.memory, x).values()) <= tolerance
    free = replace(stack.memory, anchors=frozenset())
    assert max(errors_of(stack, free, x).values()) > tolerance


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5])
def test_no_plan_with_fewer_anchors_would_do(tolerance: float) -> None:
    x = torch.randn(4, 16)
    stack = scaled(0.2, 9, max_drift=tolerance)
    stack(x)
    placed = stack.memory.anchors
    assert len(placed) in (1, 2, 3)
    for fewer in combinations(range(9), len(placed) - 1):
        plan = replace(stack.memory, anchors=frozenset(fewer))
        assert max(errors_of(stack, plan, x).values()) > tolerance, f"{fewer} would do in the place of {placed}"


def test_a_tighter_tolerance_takes_more_anchors_and_gives_better_gradients() -> None:
    x, found = torch.randn(4, 16), []
    wanted = gradients(scaled(0.1), x, "store")
    for tolerance in (1e-1, 1e-3, 1e-5):
        stack = scaled(0.1, max_drift=tolerance)
        stack(x)
        worst = max(relative_error(g, w) for g, w in zip(gradients(stack, x), wanted, strict=True))
        found.append((len(stack.memory.anchors), worst))
    counts, errors = zip(*found, strict=True)
    assert list(counts) == sorted(set(counts))
    assert list(errors) == sorted(errors, reverse=True)
    assert errors[2] < 1e-5 < errors[0] < 1


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: Any = None) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(stack(x, memory=memory)), list(stack.parameters())))


@pytest.mark.parametrize("kind", ["exact", "stored", "checkpointed", "shallow"])
def test_where_nothing_drifts_there_are_no_anchors(kind: str) -> None:
    options: dict[str, Any] = {
        "exact": {"exact": True},
        "stored": {"memory": "store"},
        "checkpointed": {"memory": "checkpoint"},
    }.get(kind, {})
    stack = scaled(1.0, 4, max_drift=1e-4, **options)
    stack(torch.randn(4, 16))
    assert stack.memory.anchors == frozenset()


def test_the_plan_stays_as_it_was_measured_and_can_be_seen() -> None:
    stack = scaled(0.1, max_drift=1e-3)
    with torch.no_grad():
        stack(torch.randn(4, 16))
    assert stack.memory.anchors == frozenset()  # no training yet
    stack(torch.randn(4, 16), memory="store")
    assert stack.memory.anchors == frozenset()  # this call has a plan of its own
    stack(torch.randn(4, 16))
    placed = stack.memory.anchors
    assert placed
    stack(100 * torch.randn(4, 16))
    assert stack.memory.anchors == placed
    assert copy.deepcopy(stack).memory.anchors == placed


def test_anchors_that_were_given_are_kept() -> None:
    stack = scaled(0.1, max_drift=1e-3, memory=rg.Plan(("reverse",) * DEPTH, anchors={7}))
    stack(torch.randn(4, 16))
    assert 7 in stack.memory.anchors
    assert len(stack.memory.anchors) > 1


def test_blocks_of_other_memory_take_no_part() -> None:
    memory = ["reverse"] * 8 + ["checkpoint"] * 4 + ["reverse"] * 8
    stack = scaled(0.1, max_drift=1e-3, memory=memory)
    stack(torch.randn(4, 16))
    assert not stack.memory.anchors & set(range(8, 12))
    assert stack.memory.memory == tuple(memory)


class Restless(nn.Module):
    """Draws from every generator and changes buffers in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        factor = random.random() + numpy.random.random()
        return torch.nn.functional.dropout(self.norm(self.linear(x)), 0.3) * factor


def test_the_measurement_leaves_nothing_behind_but_the_plan() -> None:
    def train(drift: float | None) -> list[Any]:
        torch.manual_seed(0)
        coupling = rg.couplings.Scaled(0.1)
        blocks = [rg.two_stream(Restless(), Restless(), coupling=coupling) for _ in range(6)]
        stack = rg.ReversibleSequence(blocks, max_drift=drift)
        random.seed(1)
        numpy.random.seed(1)
        y = stack(torch.randn(8, 16))
        state = [y, *stack.buffers(), torch.get_rng_state()]
        assert all(p.grad is None for p in stack.parameters())
        assert bool(stack.memory.anchors) == (drift is not None)
        return [*map(digest, state), random.random(), numpy.random.random()]

    assert train(1e-3) == train(None)


@pytest.mark.parametrize("drift", [0, -1e-3, float("nan")])
def test_a_tolerance_that_is_none_is_refused(drift: float) -> None:
    with pytest.raises(ValueError, match="drift="):
        scaled(1.0, max_drift=drift)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_anchors_every_k_blocks_bound_the_error_by_that_of_k_blocks(every: int) -> None:
    x, stack = torch.randn(4, 16), scaled(0.1)
    plan = rg.Plan(("reverse",) * DEPTH, anchors=frozenset(range(every, DEPTH, every)))
    error = max(errors_of(stack, plan, x).values(), default=0.0)
    assert error < 1e-6 * 100**every  # two steps a block, ten times each
    assert error < max(errors_of(stack, rg.Plan(("reverse",) * DEPTH), x).values())


def test_anchors_change_no_bit_of_an_exact_stack() -> None:
    blocks = [rg.two_stream(mlp(), mlp()) for _ in range(6)]
    plan = rg.Plan(("reverse",) * 6, anchors={0, 3, 4})
    as_stored(rg.ReversibleSequence(blocks, exact=True), torch.randn(4, 16), memory=plan)


def test_a_context_that_requires_grad_is_left_alone() -> None:
    def branch(x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(x + shift)

    stack = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(4)], max_drift=1e-3)
    shift = torch.randn(16, requires_grad=True)
    loss_of(stack(torch.randn(4, 16), shift=shift)).backward()
    once = shift.grad.clone()
    shift.grad = None
    loss_of(stack(torch.randn(4, 16), shift=shift)).backward()
    assert once.isfinite().all()
    assert once.any()
