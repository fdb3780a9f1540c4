"""Whether a model can be measured at all: figures of a step that makes NaN, or that computes nothing, mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine.observer import BranchRun, Observer
from retrograde.engine.preserve import preserve

from .batches import arguments, tensors_in
from .loss import Loss
from .stacks import parameters_of, stacks_in
from .training_step import clear_gradients, loss_of

_CAUSES = "Look for an overflow (float16, large weights), a division by zero or bad values in the batch."


class UnmeasurableError(ValueError):
    """A step that makes NaN or infinity, or has no values; the message says where."""


def check_step(model: nn.Module, batch: Any, loss: Loss | None = None) -> None:
    """Run one training step, and raise if it has no values, or if its loss or a gradient is not finite.

    The model is left as it was.
    """
    check_has_values(model, batch)
    with preserve(model), first_non_finite(model) as where:
        clear_gradients(parameters_of(model))
        result = loss_of(model, batch, loss)
        if not bool(torch.isfinite(result)):
            raise UnmeasurableError(why_not_finite(float(result.detach()), where))
        result.backward()
        odd = [p for p in parameters_of(model) if p.grad is not None and not _is_finite(p.grad)]
        if odd:
            names = {id(p): name for name, p in model.named_parameters()}
            raise UnmeasurableError(
                f"The loss is finite, but the gradients of {len(odd)} parameters are not, those of "
                f"{names.get(id(odd[0]), 'a tensor that a branch closes over')} among them. {_CAUSES}"
            )


def check_has_values(model: nn.Module, batch: Any) -> None:
    """Raise for a model or a batch on the meta device."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers(), *tensors_in(arguments(batch)))):
        raise UnmeasurableError(
            "The model or its batch is on the meta device, where tensors have shapes but no values: nothing is "
            "computed, so that there is nothing to measure. Move both to a real device, such as model.to_empty("
            "device='cpu') with weights that were initialised."
        )


def why_not_finite(loss: float, where: list[str]) -> str:
    """The sentence for a loss that is NaN or infinite; `where` is what `first_non_finite` noted."""
    if where:
        return f"The loss is {loss}: {where[0]} returns NaN or infinity, from finite streams. {_CAUSES}"
    return (
        f"The loss is {loss}, though no branch of a reversible stack makes NaN or infinity from finite streams: the "
        "batch has it, or what comes before or after the stacks makes it, or the loss itself does."
    )


@contextmanager
def first_non_finite(model: nn.Module) -> Iterator[list[str]]:
    """A context whose list names the first branch that returns NaN or infinity although all that it reads is finite."""
    where: list[str] = []
    stacks = stacks_in(model)
    with ExitStack() as observed:
        for name, stack in stacks.items():
            label = f"{name}: " if len(stacks) > 1 else ""
            observed.enter_context(stack.observed_by(_FirstNonFinite(label, where)))
        yield where


class _FirstNonFinite(Observer):
    def __init__(self, label: str, where: list[str]) -> None:
        self._label, self._where = label, where

    def on_step(self, run: BranchRun) -> Any:
        result = run.result()
        read = (*run.inputs, *tensors_in(dict(run.kwargs)))
        if not self._where and not all(map(_is_finite, tensors_in(result))) and all(map(_is_finite, read)):
            self._where.append(f"{self._label}block {run.block}, branch {run.step.name},")
        return result


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor.detach()).all())
