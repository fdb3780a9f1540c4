"""The guard: now and then, one recomputed stream against what it was."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import retrograde as rg
from bits import loss_of, mlp
from retrograde.engine import guard as _guard
from retrograde.engine.drift import relative_error


def drifting(guard: rg.Guard, depth: int = 4, **options: Any) -> rg.ReversibleSequence:
    """A stack that loses digits quickly."""
    coupling = rg.couplings.Scaled(0.1)
    return rg.ReversibleSequence(
        [rg.two_stream(mlp(), mlp(), coupling=coupling) for _ in range(depth)], guard=guard, **options
    )


def step(stack: rg.ReversibleSequence) -> None:
    loss_of(stack(torch.randn(4, 16))).backward()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks whose input was compared."""
    blocks: list[int] = []
    report = _guard.GuardWatch.report

    def noting(self: _guard.GuardWatch, block: int, error: float) -> None:
        blocks.append(block)
        report(self, block, error)

    monkeypatch.setattr(_guard.GuardWatch, "report", noting)
    return blocks


def test_the_guard_looks_at_one_block_every_so_many_calls_and_they_take_turns(looked_at: list[int]) -> None:
    stack = drifting(rg.Guard(every=3, tolerance=1e3))
    for _ in range(18):
        step(stack)
    assert looked_at == [0, 1, 2, 3, 0, 1]


def test_only_reversed_blocks_are_looked_at(looked_at: list[int]) -> None:
    stack = drifting(rg.Guard(every=1, tolerance=1e3), memory=["store", "reverse", "checkpoint", "reverse"])
    for _ in range(4):
        step(stack)
    assert looked_at == [1, 3, 1, 3]


def test_without_a_backward_pass_nothing_is_done(looked_at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[int] = []
    monkeypatch.setattr(_guard, "_sample", lambda stream: samples.append(1))
    stack = drifting(rg.Guard(every=1))
    with torch.no_grad():
        stack(torch.randn(4, 16))
        stack.eval()(torch.randn(4, 16))
    with torch.inference_mode():
        stack(torch.randn(4, 16))
    assert (samples, looked_at) == ([], [])


def test_calls_without_a_look_cost_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[int] = []
    monkeypatch.setattr(_guard, "_sample", lambda stream: samples.append(1))
    stack = drifting(rg.Guard(every=100))
    for _ in range(5):
        step(stack)
    assert not samples


def test_a_sample_is_small_and_spread_over_the_stream() -> None:
    stream = torch.arange(100_001.0).view(1, -1)
    taken = _guard._sample(stream)
    assert 2048 < taken.numel() <= 4096
    assert taken[0] == 0
    assert taken[-1] > 99_900
    assert taken.untyped_storage().nbytes() <= 4 * 4096  # a copy, not a view that keeps the stream


def test_drift_past_the_tolerance_warns_once_and_says_what_to_do() -> None:
    stack = drifting(rg.Guard(every=1, tolerance=1e-6))
    with pytest.warns(RuntimeWarning, match=r"input of block 0 .*exact=True.*drift=.*float32.*checkpoint"):
        step(stack)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(stack)


def test_drift_past_the_tolerance_raises_in_every_backward_pass_where_that_was_chosen() -> None:
    stack = drifting(rg.Guard(every=1, tolerance=1e-6, action="raise"))
    for block in range(3):
        with pytest.raises(rg.DriftError, match=f"input of block {block} was recomputed with a relative error of"):
            step(stack)


def test_drift_within_the_tolerance_says_nothing() -> None:
    stack = drifting(rg.Guard(every=1, tolerance=1e3, action="raise"))
    for _ in range(4):
        step(stack)


def test_an_exact_stack_passes_at_a_tolerance_of_0() -> None:
    guard = rg.Guard(every=1, tolerance=0, action="raise")
    stacks = [
        drifting(guard, exact=True),
        rg.ReversibleSequence([rg.two_stream(mlp(dropout=0.2), mlp()) for _ in range(4)], exact=True, guard=guard),
        rg.ReversibleSequence(
            [rg.momentum(mlp()) for _ in range(4)], split="first", merge="first", exact=True, guard=guard
        ),
    ]
    for stack in stacks:
        for _ in range(5):
            step(stack)
    ordinary = rg.ReversibleSequence([rg.two_stream(mlp(), mlp()) for _ in range(4)], guard=guard)
    with pytest.raises(rg.DriftError):
        step(ordinary)


RUNS: list[int] = []


class Changing(nn.Module):
    """Scaled by how often it ran, which no replay knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(1)
        return (1 + 0.01 * len(RUNS)) * self.linear(x).tanh()


@pytest.mark.parametrize("memory", ["reverse", "selective", "checkpoint"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_branch_that_is_not_the_same_twice_is_caught_and_rounding_is_not_blamed(memory: str, depth: int) -> None:
    torch.manual_seed(0)
    pairs = [(mlp(), mlp()), (mlp(), Changing()), *[(mlp(), mlp()) for _ in range(depth)]]
    guard = rg.Guard(every=1, action="raise")
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=memory, guard=guard)
    with pytest.raises(rg.DriftError, match=r"Changing in block 1 did not compute the same twice.* off by a relative"):
        step(stack)


def test_drift_of_a_deep_stack_is_not_taken_for_a_branch_that_differs() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        stack = drifting(rg.Guard(every=1, tolerance=1e-6, action="raise"), depth=8).to(dtype)
        with pytest.raises(rg.DriftError, match="input of block 0 was recomputed with a relative error"):
            loss_of(stack(torch.randn(4, 16, dtype=dtype))).backward()


def test_a_stream_of_zeros_is_measured_against_1() -> None:
    """A momentum starts at zero, and comes back as 1e-9: that is no drift."""
    guard = rg.Guard(every=1, tolerance=1e-4, action="raise")
    stack = rg.ReversibleSequence([rg.momentum(mlp()) for _ in range(3)], split="first", merge="first", guard=guard)
    for _ in range(4):
        step(stack)


def test_a_stream_that_became_nan_is_past_every_tolerance() -> None:
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert relative_error(torch.ones(1), torch.tensor([float("inf")])) == float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every 1 or more calls"),
        ({"every": -3}, "every 1 or more calls"),
        ({"tolerance": -1e-3}, "tolerance of 0 or more"),
        ({"tolerance": float("nan")}, "tolerance of 0 or more"),
        ({"action": "shout"}, "choose one of 'warn', 'raise'"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rg.Guard(**options)


def test_copies_and_pickles_keep_the_guard(looked_at: list[int]) -> None:
    stack = drifting(rg.Guard(every=2, tolerance=1e3))
    step(stack)
    for twin in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        step(twin)
    assert looked_at == [0, 0]  # each is at its second call
    assert "guard" not in "".join(stack.state_dict())


def test_the_guard_changes_no_gradient() -> None:
    torch.manual_seed(0)
    plain = rg.ReversibleSequence([rg.two_stream(mlp(dropout=0.2), mlp()) for _ in range(4)])
    guarded = copy.deepcopy(plain)
    guarded._watch = _guard.GuardWatch(rg.Guard(every=1, tolerance=1.0))
    for stack in (plain, guarded):
        torch.manual_seed(3)
        step(stack)
    for p, q in zip(plain.parameters(), guarded.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
