"""Distributed checkpoints (DCP): saved by some processes, loaded by more, by fewer, or by one without a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from joined import batch, once, part, whole
from shards import shard
from stacks import assert_close, twins
from team import Team


def optimiser_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: Any, optimiser: torch.optim.Optimizer, steps: range, *, parts: bool) -> None:
    for step in steps:
        model.zero_grad()
        once(model, part(batch(step)) if parts else batch(step)).backward()
        optimiser.step()


def state_of(model: Any, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    weights, progress = get_state_dict(model, optimiser)
    return {"model": weights, "optimiser": progress}


def train_and_save(folder: Path, way: str) -> None:
    stack, _ = twins()
    shard(stack, way)
    optimiser = optimiser_of(stack)
    train(stack, optimiser, range(2), parts=True)
    dcp.save(state_of(stack, optimiser), checkpoint_id=str(folder))


def load_and_train(folder: Path, way: str) -> None:
    stack, reference = twins()
    shard(stack, way)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    optimiser = optimiser_of(stack)
    state = state_of(stack, optimiser)
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(stack, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    train(stack, optimiser, range(2, 4), parts=True)
    train(reference, optimiser_of(reference), range(4), parts=False)
    for ours, theirs in zip(stack.parameters(), reference.parameters(), strict=True):
        assert_close(whole(ours), theirs, 1e-10)  # AdamW divides by roots of small numbers


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (2, 1), (1, 2)])
def test_a_checkpoint_loads_in_another_number_of_processes_and_training_continues(
    team: Team, store: Path, tmp_path: Path, saving: int, loading: int
) -> None:
    team.run(train_and_save, saving, store, {"folder": tmp_path / "saved", "way": "each block"})
    team.run(load_and_train, loading, store, {"folder": tmp_path / "saved", "way": "each branch"})
