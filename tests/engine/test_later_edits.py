"""Branches that edit what autograd saved, or differentiate, from some call on: what a replay must not miss, or hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

recomputing = pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
WARM_UP = 3  # calls, after which a step is steady
EDITED = "modified by an inplace operation"


class Told(nn.Module):
    """A branch that does something else from the moment that it is told to, in a way that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.told: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.unusual(x) if self.told else self.inner(x).tanh()

    def unusual(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class EditsSaved(Told):
    """Edits the result of exp, which autograd saved, and returns it."""

    def unusual(self, x: Tensor) -> Tensor:
        saved: Tensor = self.inner(x).exp()
        if self.told == [False]:
            return saved + 1
        with torch.no_grad():
            saved.add_(1)
        return saved


class EditsUnasked(Told):
    """Edits what autograd saved for a gradient that nobody asks for."""

    def unusual(self, x: Tensor) -> Tensor:
        unused = self.inner(x).exp()
        with torch.no_grad():
            unused.add_(1)
        result: Tensor = self.inner(x).tanh()
        return result


class Differentiates(Told):
    """A branch that is a force: the gradient of an energy."""

    def unusual(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            position = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.inner(position).pow(3).sum(), position, create_graph=True)
        return force


def steady(kind: type[Told], memory: str) -> tuple[rg.ReversibleSequence, list[Any], Tensor]:
    torch.manual_seed(0)
    branches = [kind() for _ in range(6)]
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    stack = rg.ReversibleSequence(blocks, memory=memory)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(WARM_UP):
        stack(x).sum().backward()
    return stack, branches, x


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: str) -> list[Tensor]:
    return list(torch.autograd.grad(stack(x, memory=memory).sin().sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("which", range(6))
def test_a_branch_that_edits_what_autograd_saved_is_detected(which: int) -> None:
    stack, branches, x = steady(EditsSaved, "reverse")
    branches[which].told.append(True)
    for memory in ("store", "reverse"):
        with pytest.raises(RuntimeError, match=EDITED):
            gradients(stack, x, memory)


@pytest.mark.parametrize("which", range(6))
def test_a_checkpointed_branch_that_edits_what_autograd_saved_is_detected_or_does_no_harm(which: int) -> None:
    """The last replay of a block stops before the edit: then what is served was not edited."""
    stack, branches, x = steady(EditsSaved, "checkpoint")
    branches[which].told.append(False)
    expected = gradients(stack, x, "store")
    branches[which].told[0] = True
    try:
        found = gradients(stack, x, "checkpoint")
    except RuntimeError as error:
        if EDITED not in str(error):
            raise
    else:
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


@recomputing
@pytest.mark.parametrize("kind", [EditsUnasked, Differentiates])
@pytest.mark.parametrize("which", range(6))
def test_what_autograd_allows_in_a_branch_gives_the_gradients_of_autograd(
    memory: str, kind: type[Told], which: int
) -> None:
    stack, branches, x = steady(kind, memory)
    branches[which].told.append(True)
    for _ in range(2):
        for mine, plain in zip(gradients(stack, x, memory), gradients(stack, x, "store"), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


@recomputing
def test_a_replay_of_which_autograd_asked_a_part_is_freed_without_the_garbage_collector(memory: str) -> None:
    stack, _, x = steady(Told, memory)
    saved: list[weakref.ref[Tensor]] = []

    gc.collect()
    gc.disable()
    try:
        for step in stack.modules():
            if isinstance(step, Told):
                step.inner.register_forward_hook(lambda _m, _a, result: saved.append(weakref.ref(result)))
        loss = stack(x).sin().sum()
        saved.clear()
        last = list(stack.parameters())[4]  # of the second block: the replay of the first one is not asked for
        torch.autograd.grad(loss, last)
        assert saved
        del loss
        assert all(ref() is None for ref in saved)
    finally:
        gc.enable()
