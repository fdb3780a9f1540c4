"""Plans are plain data: printed, saved, compared, edited by hand, applied, and recorded in a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

MODES = ("store", "reverse", "selective", "checkpoint", "offload", "reverse")
PLAN = rg.Plan(MODES, anchors={2, 5})


def stack_of(memory: Any = "reverse") -> rg.ReversibleSequence:
    torch.manual_seed(0)
    layers = [(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)) for _ in MODES]
    return rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers], memory=memory).double()


def gradients(stack: rg.ReversibleSequence, x: Tensor, **options: Any) -> list[Tensor]:
    stack.zero_grad()
    stack(x, **options).square().sum().backward()
    return [p.grad.clone() for p in stack.parameters() if p.grad is not None]


def test_a_plan_is_printed_in_one_line_that_names_every_block_once() -> None:
    assert str(PLAN) == (
        "blocks 0 store, 1 reverse, 2 selective, 3 checkpoint, 4 offload, 5 reverse; anchors before 2, 5"
    )
    assert str(rg.Plan.uniform("reverse", 6, anchor_every=4)) == "blocks 0-5 reverse; anchors before 4"
    assert eval(repr(PLAN), {"Plan": rg.Plan}) == PLAN


def test_a_plan_is_saved_as_json_and_comes_back_the_same() -> None:
    text = PLAN.to_json()
    assert json.loads(text) == {"memory": list(MODES), "anchors": [2, 5]}
    assert rg.Plan.from_json(text) == PLAN
    assert pickle.loads(pickle.dumps(PLAN)) == copy.deepcopy(PLAN) == PLAN
    assert rg.Plan.from_json('{"memory": ["store"]}') == rg.Plan(["store"])


def test_plans_are_compared_by_what_they_say() -> None:
    assert rg.Plan(list(MODES), anchors=[5, 2]) == PLAN
    assert hash(rg.Plan(list(MODES), anchors=[5, 2])) == hash(PLAN)
    assert dataclasses.replace(PLAN, anchors={2}) != PLAN
    assert rg.Plan.uniform("store", 6) != rg.Plan.uniform("store", 5)


def test_a_plan_that_is_edited_by_hand_is_another_plan_and_is_checked() -> None:
    edited = json.loads(PLAN.to_json())
    edited["memory"][0] = "checkpoint"
    assert rg.Plan.from_dict(edited).memory == ("checkpoint", *MODES[1:])
    assert PLAN.memory == MODES
    edited["memory"][0] = "kept"
    with pytest.raises(ValueError, match="memory='kept' is not known; choose one of 'reverse'"):
        rg.Plan.from_dict(edited)
    with pytest.raises(ValueError, match=r"'memory' and 'anchors', but \['mode'\] were given"):
        rg.Plan.from_dict({"mode": ["store"]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.memory = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "by name, but a list was given"),
        ("{}", "a list with a mode per block, but none was given"),
        ('{"memory": "reverse"}', r"not memory='reverse': write Plan\.uniform"),
        ('{"memory": ["reverse"], "anchors": ["0"]}', r"the numbers of blocks, not \['0'\]"),
        ('{"memory": ["reverse"], "anchors": [0.5]}', r"the numbers of blocks, not \[0\.5\]"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rg.Plan.from_json(text)


@pytest.mark.parametrize("how", ["constructor", "assigned", "for a call"])
def test_a_plan_of_every_mode_is_applied_and_gives_the_gradients_of_stored_activations(how: str) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    stack = stack_of(PLAN if how == "constructor" else "reverse")
    if how == "assigned":
        stack.memory = PLAN
    found = gradients(stack, x, **({"memory": PLAN} if how == "for a call" else {}))
    for one, other in zip(found, gradients(stack, x, memory="store"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert stack.memory == (rg.Plan.uniform("reverse", 6) if how == "for a call" else PLAN)


def test_a_plan_is_recorded_in_a_checkpoint_beside_the_weights() -> None:
    """As lists and strings: a checkpoint with it is loaded with weights_only, as any other."""
    stack, x = stack_of(PLAN), torch.randn(4, 8, dtype=torch.float64)
    file = io.BytesIO()
    torch.save({"weights": stack.state_dict(), "plan": stack.memory.to_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    fresh = stack_of("store")
    fresh.load_state_dict(checkpoint["weights"])
    fresh.memory = rg.Plan.from_dict(checkpoint["plan"])
    assert fresh.memory == PLAN
    assert all(torch.equal(a, b) for a, b in zip(gradients(fresh, x), gradients(stack, x), strict=True))


@pytest.mark.parametrize(
    ("anchors", "running", "anchored"), [({0}, [0, 1, 2], [0]), ({1}, [2], [2]), ({2}, [0, 1, 2], [2])]
)
def test_a_segment_starts_at_each_anchor_that_is_reached(
    anchors: set[int], running: list[int], anchored: list[int]
) -> None:
    segments = list(rg.Plan(["reverse"] * 3, anchors=anchors).segments(running))
    assert [segment.blocks[0] for segment in segments if segment.is_anchored] == anchored
    assert [i for segment in segments for i in segment.blocks] == running
