"""A memory mode that is added from outside of the package trains like the built-in ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.checkpoint import CheckpointTape
from retrograde.memory import MODES, MemoryMode, register
from retrograde.planning import plan
from stacks import Mlp, all_close, loss_of, sample

WRITTEN: list[Path] = []


class OnDisk:
    """Keeps streams in a file until the backward pass."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".pt", delete=False) as file:
            torch.save(tensors, file)
        self.path = Path(file.name)
        WRITTEN.append(self.path)

    def tensors(self) -> tuple[Tensor, ...]:
        tensors: tuple[Tensor, ...] = torch.load(self.path)
        return tensors


DISK = MemoryMode("disk", "save each block's input to a file", partial(CheckpointTape, keep=OnDisk), blocks_per_tape=1)


@pytest.fixture(autouse=True)
def _no_files_are_left() -> Iterator[None]:
    yield
    while WRITTEN:
        WRITTEN.pop().unlink()
    MODES.pop("disk", None)


def gradients(memory: Any, depth: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(depth)], memory=memory)
    loss_of(stack(sample(4, 6))).backward()
    return [p.grad for p in stack.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "memory", [DISK, ["reverse", DISK, "store", DISK], rg.Plan([DISK, "reverse", "checkpoint", DISK], anchors={2})]
)
def test_a_mode_of_ones_own_gives_the_gradients_of_stored_activations(memory: Any) -> None:
    all_close(gradients(memory), gradients("store"))
    assert WRITTEN


def test_a_registered_mode_is_named_like_any_other() -> None:
    with pytest.raises(ValueError, match="memory='disk' is not known; choose one of 'reverse'"):
        gradients("disk")
    register(DISK)
    all_close(gradients("disk"), gradients("store"))
    assert str(rg.Plan(["disk", "store"])) == "blocks 0 disk, 1 store"
    assert rg.Plan.from_json(rg.Plan([DISK]).to_json()) == rg.Plan(["disk"])


def test_a_mode_that_is_not_registered_cannot_be_written_as_json() -> None:
    with pytest.raises(ValueError, match=r"'disk' of the plan is not registered"):
        rg.Plan([DISK]).to_json()


def test_a_mode_of_ones_own_that_needs_an_inverse_falls_back_where_there_is_none() -> None:
    mirror = MemoryMode("mirror", "reverse by another name", MODES["reverse"].make_tape, needs_inverse=True)
    blocks = [rg.two_stream(Mlp(), Mlp()), rg.transition(nn.Linear(6, 3).double(), nn.Linear(6, 3).double())]
    stack = rg.ReversibleSequence(blocks, memory=mirror)
    assert [mode.name for mode in stack.memory.modes] == ["mirror", "checkpoint"]


def test_the_planner_measures_a_registered_mode_too() -> None:
    register(DISK)
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp()) for _ in range(3)])
    planned = plan(stack, sample(4, 6), "1GiB")
    assert "disk" in planned.chain.blocks[0].modes
