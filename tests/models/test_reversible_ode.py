"""A differential equation solved reversibly: the gradients of its steps to the bit, in flat memory."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde import models
from retrograde.measure import MemoryTracker


class Field(nn.Module):
    """A field that depends on time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, t: float, x: Tensor) -> Tensor:
        result: Tensor = self.outer(torch.tanh(self.inner(x))) * math.cos(t)
        return result


def gradients(steps: int, memory: str, *, tracked: bool = True, **options: Any) -> tuple[list[Tensor], int]:
    """Of the initial state and the field's parameters; and the peak of the step, in bytes."""
    torch.manual_seed(0)
    solver = models.ReversibleODE(Field(), steps, memory=memory, **options)  # type: ignore[arg-type]
    x = torch.randn(512, 8, requires_grad=True)
    tracker = MemoryTracker(ignore=[solver, x])
    with tracker if tracked else nullcontext():
        found = torch.autograd.grad(solver(x).square().sum(), [x, *solver.parameters()])
    return list(found), tracker.peak


def test_gradients_over_1000_solver_steps_are_those_of_stored_states_to_the_bit_in_flat_memory() -> None:
    (found, peak), (_, short_peak) = gradients(1000, "reverse"), gradients(100, "reverse")
    wanted, _ = gradients(1000, "store", tracked=False)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert peak <= 1.15 * short_peak  # a range that is checked takes 16 bytes per step
    assert gradients(100, "store")[1] > 10 * peak


def test_without_a_grid_the_recomputed_states_drift() -> None:
    (found, _), (wanted, _) = (gradients(100, m, tracked=False, exact=False) for m in ("reverse", "store"))
    assert not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_error_falls_with_the_square_of_the_step() -> None:
    """A rotation, whose solution is known."""
    turn = nn.Linear(2, 2, bias=False).double()
    turn.weight.data = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def error(steps: int) -> float:
        end = models.ReversibleODE(turn, steps, span=1.0, time="none")(x)
        return (end - torch.tensor([math.cos(1.0), math.sin(1.0)], dtype=torch.float64)).norm().item()

    assert 3.5 < error(50) / error(100) < 4.5


def test_a_solver_has_the_parameters_of_its_field_once_and_a_copy_has_its_own() -> None:
    solver = models.ReversibleODE(Field(), 10)
    assert list(solver.state_dict()) == [f"f.{name}" for name in solver.f.state_dict()]
    x = torch.randn(2, 8)
    before, twin = solver(x), copy.deepcopy(solver)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(solver(x), before)
    assert not torch.equal(twin(x), before)


def test_a_single_step_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two steps or more"):
        models.ReversibleODE(Field(), 1)
