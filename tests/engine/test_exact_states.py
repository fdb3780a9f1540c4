"""An exact stack that took another grid in a call: saved and loaded, it gives the same bits."""

from __future__ import annotations

import copy
import io
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from bits import assert_same_bits, mlp, observed, stack_of

X = torch.full((4, 16), 700.0) + torch.linspace(0, 1, 16)  # past 256, up to which the grid of 2^-16 is exact


def bits_of(stack: rg.ReversibleSequence) -> set[Any]:
    return {step.coupling.bits for block in stack.blocks for step in block.each_step()}  # type: ignore[operator, union-attr]


def fresh(**options: Any) -> rg.ReversibleSequence:
    return stack_of(mlp, 3, **{"exact": True, "overflow": "rescale", **options})


def rescaled(**options: Any) -> rg.ReversibleSequence:
    stack = fresh(**options)
    with pytest.warns(RuntimeWarning, match="continues with a grid"):
        stack(X)
    assert bits_of(stack) < {11, 12, 13, 14}
    return stack


def test_a_state_holds_what_the_branches_hold_and_the_grid_only_if_it_was_taken_in_a_call() -> None:
    plain, stack = fresh(), fresh()
    stack(X / 10)
    assert list(stack.state_dict()) == list(plain.state_dict())
    assert not [name for name in plain.state_dict() if "branch" not in name]
    more = set(rescaled().state_dict()) - set(plain.state_dict())
    assert more == {f"blocks.{i}.rescaled_bits" for i in range(3)}


@pytest.mark.parametrize("memory", ["reverse", "store"])
def test_a_stack_saved_after_a_rescale_and_loaded_gives_the_same_bits(memory: str) -> None:
    stack = rescaled()
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    loaded = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it starts with that grid, and need not find it again
        assert not any(loaded.load_state_dict(torch.load(file, weights_only=True)))
        small = torch.randn(4, 16)  # which would be on the finer grid, too
        assert_same_bits(observed(loaded, small, memory=memory), observed(stack, small, memory=memory))
        assert_same_bits(observed(loaded, X, memory=memory), observed(stack, X, memory=memory))
    assert bits_of(loaded) == bits_of(stack)
    other = fresh()
    other.load_state_dict({k: v for k, v in stack.state_dict().items() if "rescaled" not in k})
    assert not torch.equal(other(small), stack(small)), "the grid must matter, or the test sees nothing"


def test_a_rescaled_stack_that_loads_an_ordinary_state_returns_to_its_own_grid() -> None:
    stack, before = rescaled(), fresh(exact=True, grid_bits=15)
    stack.load_state_dict(fresh().state_dict())
    assert bits_of(stack) == {None}
    assert list(stack.state_dict()) == list(before.state_dict())
    again = rescaled(exact=True, grid_bits=15)
    again.load_state_dict(rescaled().state_dict())
    again.load_state_dict(before.state_dict())
    assert bits_of(again) == {15}


def test_a_grid_that_is_given_by_hand_is_no_part_of_the_state() -> None:
    stack = rescaled()
    stack.grid_bits = 12
    assert list(stack.state_dict()) == list(fresh().state_dict())
    stack = rescaled()
    stack.exact = False
    assert list(stack.state_dict()) == list(fresh().state_dict())


def test_a_stack_that_is_not_exact_any_more_says_so_when_it_loads_a_grid() -> None:
    stack = fresh()
    stack.exact = False
    with pytest.raises(RuntimeError, match=r"blocks\.0\.rescaled_bits: the state is that of an exact stack.*2\^-1\d"):
        stack.load_state_dict(rescaled().state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rescaled_bits"):
        fresh(exact=False).load_state_dict(rescaled().state_dict())


def test_copies_and_whole_modules_that_are_saved_keep_the_grid_and_load_for_themselves() -> None:
    stack = rescaled()
    bits = bits_of(stack)
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    for twin in (copy.deepcopy(stack), torch.load(file, weights_only=False)):
        assert bits_of(twin) == bits
        twin.load_state_dict(fresh().state_dict())
        assert (bits_of(twin), bits_of(stack)) == ({None}, bits)


def test_a_stack_inside_a_model_and_a_shared_block_keep_their_grid() -> None:
    block = rg.two_stream(mlp(), mlp())
    model = nn.Sequential(rg.ReversibleSequence([block, block], exact=True, overflow="rescale"), nn.Linear(16, 2))
    with pytest.warns(RuntimeWarning, match="continues with a grid"):
        model(X)
    twin = nn.Sequential(
        rg.ReversibleSequence([b := rg.two_stream(mlp(), mlp()), b], exact=True, overflow="rescale"), nn.Linear(16, 2)
    )
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(X / 100), model(X / 100))


def test_a_rescaled_call_leaves_what_a_function_closes_over_as_one_call_would() -> None:
    """Its generator and the buffers of its module, which are no part of the stack."""
    seen = []
    for bits in (16, 12):
        generator, norm, draws = torch.Generator().manual_seed(0), nn.BatchNorm1d(16), random.Random(0)

        def branch(x: Tensor, norm: Any = norm, generator: Any = generator, draws: Any = draws) -> Tensor:
            return norm(x) + torch.rand(16, generator=generator) + 1000 + draws.random()

        stack = rg.ReversibleSequence(
            [rg.two_stream(branch, nn.Tanh())], exact=True, grid_bits=bits, overflow="rescale"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack(torch.linspace(0, 1, 64).view(4, 16))
        assert bits_of(stack) < {12, 13, 14}
        seen.append((int(norm.num_batches_tracked), torch.rand(1, generator=generator).item(), draws.random()))
    assert seen[0] == seen[1]
