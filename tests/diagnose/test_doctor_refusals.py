"""What the doctor cannot examine it says in a sentence, and never by a traceback into the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from examined import WIDTH, Around, batch, mlp, stack_of
from retrograde.diagnose import ExaminationError, examine


class Unsteady(nn.Module):
    """Has state where nobody looks."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return torch.tanh(x) * len(self.calls)


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - x)


class Outside(nn.Module):
    """A stack that is called without grad mode, or not at all."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.stack = stack_of(2)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == "no_grad":
            with torch.no_grad():
                x = self.stack(x)
        return self.out(x)


def fails(x: Tensor) -> Tensor:
    raise KeyError("colour")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "not a module": (lambda: torch.tanh, "torch.nn.Module, not a value of type builtin_function"),
    "no stack": (mlp, "contains no retrograde.ReversibleSequence"),
    "no invertible block": (
        lambda: rg.ReversibleSequence([rg.transition(mlp(), mlp())], memory="checkpoint"),
        "No block of ReversibleSequence can be inverted",
    ),
    "nondeterministic branch": (lambda: stack_of(2, Unsteady), "block 0, branch Unsteady, is not deterministic"),
    "NaN in the forward": (lambda: stack_of(2, Infinite), "block 0, branch Infinite, returns NaN or infinity"),
    "frozen": (lambda: Around(stack_of(1), stack_of(1)).requires_grad_(False).eval(), "The loss does not require grad"),
    "raises": (lambda: rg.ReversibleSequence([rg.two_stream(fails, mlp())]), "raised by the branch fails in block 0"),
    "called without grad": (lambda: Outside("no_grad"), "calls it only under no_grad"),
    "not called": (lambda: Outside("never"), "calls it not at all"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_examined_is_said_in_a_sentence(case: str) -> None:
    make, words = BAD[case]
    with pytest.raises(ExaminationError) as raised:
        examine(make(), batch())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda y: y, r"The loss is a tensor of shape \(8, 16\), and a training step starts from one number"),
        (lambda y: 3.0, "The loss is a float"),
        (lambda y: y.sum() * math.inf, "The loss is"),
        (lambda y: y.detach().sum(), "The loss does not require grad"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(loss: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(ExaminationError, match=words):
        examine(stack_of(1), batch(), loss=loss)


def test_a_tolerance_must_be_positive() -> None:
    with pytest.raises(ExaminationError, match="tolerance=0"):
        examine(stack_of(1), batch(), tolerance=0)
