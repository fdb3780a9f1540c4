"""What the parts of benchmarks/paper_predictions.py share: the modes, a CPU on paper, and real training steps."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from harness.paper_models import Made
from retrograde.measure.stacks import stacks_of
from retrograde.measure.training_step import loss_of
from retrograde.planning.on_paper.devices import Device

MODES = ("store", "checkpoint", "reverse")
CPU = Device("cpu", 10**13, 1e10, {"float32": 1e11}, is_cpu=True, title="CPU")

Section = tuple[list[str], list[str]]
"""The lines of a part of the report, and what is past the limits in it."""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


Wrap = Callable[[nn.Module], nn.Module]


def prepare(make: Callable[[], Made], mode: str, wrap: Wrap | None = None) -> Callable[[], None]:
    """A model and its optimiser; returns its training step."""
    torch.manual_seed(0)
    model, batch, loss, optimizer = (*make(), None, None)[:4]
    for stack in stacks_of(model).values():
        stack.memory = mode
    if wrap is not None:
        model, optimizer = wrap(model), None
    optimizer = optimizer or torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch, loss).backward()
        optimizer.step()

    return step
