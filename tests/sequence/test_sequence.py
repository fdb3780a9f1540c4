"""The module that users hold: its length, its blocks, its settings, and what its errors name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import MEMORIES, Mlp, memory_of, sample


def stack_of(depth: int = 3, **options: Any) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(depth)], **options)


def test_a_stack_has_a_length_an_index_and_an_order() -> None:
    blocks = [rg.two_stream(Mlp(), Mlp()) for _ in range(3)]
    stack = rg.ReversibleSequence(blocks)
    assert len(stack) == 3
    assert stack[0] is blocks[0]
    assert stack[-1] is blocks[2]
    assert list(stack) == blocks
    with pytest.raises(IndexError):
        stack[3]


def test_two_stream_takes_its_branches_by_keyword() -> None:
    f, g = Mlp(), Mlp()
    steps = rg.two_stream(f=f, g=g).each_step()
    assert [step.branch for step in steps] == [f, g]


def test_a_repr_is_short_and_names_the_memory_and_the_grid() -> None:
    first = repr(stack_of(memory="checkpoint", split="duplicate")).splitlines()[1]
    assert first.strip() == "split='duplicate', merge='mean', dim=-1, memory='checkpoint'"
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(4, 4), nn.Linear(4, 4))], exact=True, grid_bits=12)
    assert "exact=True, grid_bits=12" in repr(stack)


def test_a_guard_can_be_assigned_and_taken_away() -> None:
    stack = stack_of(1)
    assert stack.guard is None
    stack.guard = rg.Guard(every=7)
    assert stack.guard == rg.Guard(every=7)
    stack.guard = None
    assert stack.guard is None
    with pytest.raises(TypeError, match=r"guard=5: give a retrograde\.Guard"):
        stack.guard = 5  # type: ignore[assignment]


def test_a_drift_tolerance_can_be_assigned_and_places_anchors_in_the_next_call() -> None:
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(0.1)
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8), coupling=coupling)] * 12)
    stack.max_drift = 1e-4
    assert not stack.memory.anchors
    stack(torch.randn(2, 8))
    assert stack.memory.anchors
    for wrong in (-1, "1e-3", float("nan")):
        with pytest.raises(ValueError, match=f"max_drift={wrong!r} is no tolerance"):
            stack.max_drift = wrong  # type: ignore[assignment]


def test_assigning_exact_to_itself_changes_nothing() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(4, 4), nn.Linear(4, 4))], exact=True, grid_bits=12)
    stack.exact = stack.exact
    assert (stack.exact, stack.grid_bits) == (True, 12)
    stack.grid_bits = stack.grid_bits
    assert stack.grid_bits == 12


@pytest.mark.parametrize("value", [1, 12, "yes", None])
def test_exact_is_true_or_false_and_the_bits_have_a_name_of_their_own(value: Any) -> None:
    with pytest.raises(TypeError, match=r"give True or False; the grid's bits are stack\.grid_bits"):
        stack_of(1).exact = value
    with pytest.raises((TypeError, ValueError), match="grid_bits"):
        stack_of(1, exact=value)


def test_bits_of_a_grid_without_exact_are_refused() -> None:
    with pytest.raises(ValueError, match="grid_bits=12 is for exact stacks: give exact=True too"):
        stack_of(1, grid_bits=12)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("on purpose")


@pytest.mark.parametrize("memory", [*MEMORIES, "no grad"])
def test_an_error_inside_a_branch_says_which_block_it_came_from(memory: str) -> None:
    blocks = [rg.two_stream(Mlp(), Mlp()), rg.two_stream(Mlp(), Failing()), rg.two_stream(Mlp(), Mlp())]
    stack = rg.ReversibleSequence(blocks)
    stack.memory = memory_of("reverse" if memory == "no grad" else memory, 3)
    with torch.set_grad_enabled(memory != "no grad"), pytest.raises(KeyError, match="on purpose") as caught:
        stack(sample(4, 6))
    notes = getattr(caught.value, "__notes__", [str(caught.value)])
    assert any("branch Failing in block 1" in note for note in notes)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_wrong_input_width_names_the_block_and_the_branch(memory: str) -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(3)], memory=memory_of(memory, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        stack(sample(4, 5))
    notes = getattr(caught.value, "__notes__", [str(caught.value)])
    assert any("branch Mlp in block 0" in note and "(4, 5)" in note for note in notes)
