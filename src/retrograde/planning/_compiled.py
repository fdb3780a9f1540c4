"""A plan for a model that backend="retrograde" compiles, from measurements of whole compiled steps.

NOTE [Plans of compiled models]
 A compiler fuses across blocks, so that what a block costs by itself is not what it costs in the graph. So whole steps
 are measured, under plans that reverse the first blocks and store the rest: the backward pass begins with the last
 blocks, and what they stored is free when the reversed ones begin. Of these plans, the one that stores most within the
 budget is the fastest. Each costs a compilation: the next one to try follows from the peaks so far, which are nearly
 linear in the number of stored blocks, so that three or four are enough for blocks that are alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from retrograde.engine.preserve import preserve
from retrograde.engine.torch_internals import backends_of, noting_allocations
from retrograde.measure import device_memory
from retrograde.measure.loss import Loss
from retrograde.measure.stacks import parameters_of
from retrograde.measure.timing import Progress
from retrograde.measure.training_step import clear_gradients, loss_of, step_seconds
from retrograde.memory import STORE, Plan
from retrograde.sequence import ReversibleSequence

from ._costs import Prediction
from ._measure import following

_STEPS = 3  # of which the fastest counts
_GUESSES = 4  # that peaks are linear in the number of stored blocks; then bisection


def is_compiled_by_us(model: nn.Module, stack: ReversibleSequence) -> bool:
    """Whether a stack is in a part of the model that was compiled with backend="retrograde"."""
    return any(
        any(module is stack for module in part.modules())
        for part in model.modules()
        if any(getattr(backend, "reads_marks", False) for backend in backends_of(part))
    )


def storing_last(stack: ReversibleSequence, stored: int) -> Plan:
    """The plan that stores the last blocks and reverses those before them."""
    blocks = list(stack)
    reversed_blocks = Plan.uniform("reverse", blocks).memory[: len(blocks) - stored]
    return Plan((*reversed_blocks, *[STORE.name] * stored), stack.memory.anchors)


def measured_compiled(model: nn.Module, batch: Any, *, loss: Loss | None = None) -> Prediction:
    """The peak and the time of a step of a compiled model as it is now."""
    step_seconds(model, batch, loss)  # it is compiled here
    seconds = min(step_seconds(model, batch, loss) for _ in range(_STEPS))
    return Prediction(seconds=seconds, peak=_peak(model, batch, loss))


def _peak(model: nn.Module, batch: Any, loss: Loss | None) -> int:
    """The most bytes that a step has alive in addition to the model and the batch, from cleared gradients."""
    clear_gradients(parameters_of(model))
    gc.collect()
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
    if device is not None:
        before = device_memory.allocated(device)
        device_memory.reset_peak(device)
        loss_of(model, batch, loss).backward()
        return device_memory.peak(device) - before
    changes: list[int] = []
    with noting_allocations(changes):
        loss_of(model, batch, loss).backward()
    return max(accumulate(changes, initial=0))


class CompiledSteps:
    """The measured steps of a compiled model, by the number of blocks that are stored."""

    def __init__(
        self, model: nn.Module, batch: Any, stack: ReversibleSequence, *, loss: Loss | None, progress: Progress
    ) -> None:
        self.stack = stack
        self.steps: dict[int, Prediction] = {}
        self._model, self._batch, self._loss, self._progress = model, batch, loss, progress

    def __getitem__(self, stored: int) -> Prediction:
        if stored not in self.steps:
            self._progress(f"a compiled step that stores {stored} of {len(self.stack)} blocks", len(self.steps), 0)
            original = getattr(self._model, "_orig_mod", self._model)
            with preserve(original), following(self.stack, storing_last(self.stack, stored)):
                self.steps[stored] = measured_compiled(self._model, self._batch, loss=self._loss)
            torch.compiler.reset()  # a few graphs of one model are the most that the compiler allows
        return self.steps[stored]


def most_stored(blocks: int, budget: int, peak: Callable[[int], int]) -> int:
    """The largest number of stored blocks whose peak is within the budget. That of storing none is known to be.

    Args:
        peak: the peak that was measured with so many stored blocks, taken to grow with them. It is asked of few.
    """
    low, high, attempts = 0, blocks + 1, 0  # within the budget, and not
    while high - low > 1:
        if attempts >= _GUESSES:
            middle = (low + high) // 2
        elif low == 0 and high > blocks:
            middle = 1
        else:
            first, second = (low, high) if high <= blocks else (0, low)
            slope = (peak(second) - peak(first)) / (second - first)
            middle = low + int((budget - peak(low)) / slope) if slope > 0 else blocks
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if peak(middle) <= budget else (low, middle)
        attempts += 1
    return low
