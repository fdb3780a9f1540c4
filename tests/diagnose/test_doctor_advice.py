"""What the doctor advises helps when it is done, and what is not trained is not profiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.diagnose import ExaminationError, examine, profile


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def divided(depth: int, keep: float, memory: Any = "reverse") -> rg.ReversibleSequence:
    coupling = rg.couplings.Scaled(keep=keep)
    return rg.ReversibleSequence([rg.two_stream(mlp(), mlp(), coupling=coupling) for _ in range(depth)], memory=memory)


def make_uneven() -> nn.Module:
    return nn.Sequential(divided(16, 0.3), nn.Linear(16, 16), divided(7, 0.2))


@pytest.mark.parametrize("make", [make_uneven, lambda: divided(8, 0.3, "store"), lambda: divided(8, 0.3)])
def test_anchors_set_as_the_doctor_says_cure_every_stack(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make(), torch.randn(4, 16)
    diagnosis = examine(model, batch)
    assert not diagnosis.healthy
    (said,) = [s.how for s in diagnosis.suggestions if s.remedy.startswith("Anchors")]
    code = re.search(r"Set (stack\.memory = .*)\.$", said)
    assert code is not None
    for stack in model.modules():
        if isinstance(stack, rg.ReversibleSequence):
            exec(code[1], {"stack": stack, "Plan": rg.Plan})
    assert examine(model, batch).healthy


def test_a_stack_that_was_set_to_checkpoint_as_advised_is_healthy_beside_one_that_reverses() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(divided(8, 0.3), nn.Linear(16, 16), divided(2, 0.9)), torch.randn(4, 16)
    assert not examine(model, batch).healthy
    model[0].memory = "checkpoint"
    assert examine(model, batch).healthy


class Beside(nn.Module):
    """Has a stack, and calls it not at all or without gradients."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.stack, self.head, self.calls = divided(2, 0.9), nn.Linear(16, 16), calls

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.stack(x) if self.calls else x
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(("calls", "words"), [(False, "not at all"), (True, "only under no_grad")])
def test_a_model_that_does_not_train_its_stack_is_not_profiled(calls: bool, words: str) -> None:
    with pytest.raises(ExaminationError, match=words):
        profile(Beside(calls), torch.randn(4, 16))


def test_a_stack_that_places_anchors_itself_is_examined() -> None:
    torch.manual_seed(0)
    stack = rg.ReversibleSequence(divided(8, 0.9), max_drift=1e-3)
    assert examine(stack, torch.randn(4, 16)).healthy


def test_a_stack_with_a_stage_transition_can_be_set_as_the_doctor_says() -> None:
    torch.manual_seed(0)
    blocks = [*divided(4, 0.3), rg.transition(mlp(), mlp()), *divided(8, 0.3)]
    stack, batch = rg.ReversibleSequence(blocks, memory="store"), torch.randn(4, 16)
    diagnosis = examine(stack, batch)
    (anchors,) = [s.how for s in diagnosis.suggestions if s.remedy.startswith("Anchors")]
    exec(anchors.removeprefix("Set ").removesuffix("."), {"stack": stack, "Plan": rg.Plan})
    assert stack.memory.memory[4] == "checkpoint"
    assert examine(stack, batch).healthy


def test_the_verdict_says_when_nothing_is_set_to_be_reversed() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 16)
    assert examine(divided(8, 0.3, "checkpoint"), batch).verdict.startswith("No block is set to be reversed")
    assert examine(divided(8, 0.3), batch).verdict.startswith("Fault")
