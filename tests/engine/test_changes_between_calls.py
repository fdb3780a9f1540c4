"""A call shares what it can with the call before it. What was changed in between is seen, whatever it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import RECOMPUTING, Mlp, agree, all_close, loss_of, memory_of, sample, twins

Change = Callable[[list[Any]], None]


class Shifted(Mlp):
    """An Mlp that adds a plain attribute, which is no tensor at first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra


def exchange_a_weight(branches: list[Any]) -> None:
    for i, branch in enumerate(branches):
        branch.inner.weight = nn.Parameter(sample(7, 6, seed=i, grad=False))


def exchange_a_module(branches: list[Any]) -> None:
    for i, branch in enumerate(branches):
        torch.manual_seed(i)
        branch.outer = nn.Linear(7, 6).double()


def freeze_a_weight(branches: list[Any]) -> None:
    for branch in branches:
        branch.inner.weight.requires_grad_(False)


def take_a_bias_away(branches: list[Any]) -> None:
    for branch in branches:
        branch.outer.bias = None


def end_training(branches: list[Any]) -> None:
    for branch in branches:
        branch.eval()


def begin_dropout(branches: list[Any]) -> None:
    for branch in branches:
        branch.dropout.p = 0.5


def hold_a_tensor(branches: list[Any]) -> None:
    for branch in branches:
        branch.extra = sample(6, seed=9, grad=False)


def hold_a_buffer(branches: list[Any]) -> None:
    for branch in branches:
        del branch.extra
        branch.register_buffer("extra", sample(6, seed=9, grad=False))


def hook_a_module(branches: list[Any]) -> None:
    for branch in branches:
        branch.inner.register_forward_hook(lambda module, inputs, output: 2 * output)


CHANGES: list[Change] = [exchange_a_weight, exchange_a_module, freeze_a_weight, take_a_bias_away, end_training,
                         begin_dropout, hold_a_tensor, hold_a_buffer, hook_a_module]  # fmt: skip


def branches_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Shifted)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", RECOMPUTING)
def test_what_was_changed_after_calls_that_were_alike_is_seen(memory: str, change: Change) -> None:
    def scenario(model: Any) -> list[Tensor]:
        seen = []
        for step in range(5):
            if step == 3:
                change(branches_of(model))
            x = sample(4, 6, seed=step)
            y = model(x)
            loss_of(y).backward()
            seen += [y, x.grad]
        return seen

    agree(*twins(Shifted, memory=memory), scenario)


@pytest.mark.parametrize("change", [exchange_a_weight, exchange_a_module, freeze_a_weight, end_training])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("memory", RECOMPUTING)
def test_what_is_changed_between_forward_and_backward_changes_no_gradient(
    memory: str, dropout: float, change: Change
) -> None:
    def scenario(model: Any) -> list[Tensor]:
        for branch in branches_of(model):
            branch.dropout.p = dropout
        for step in range(4):
            x = sample(4, 6, seed=step)
            y = model(x)
            if step == 3:
                change(branches_of(model))
            loss_of(y).backward()
        return [y, x.grad]

    agree(*twins(Shifted, memory=memory), scenario)


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_another_branch_and_another_coupling_are_seen(memory: str) -> None:
    stack, reference = twins(memory=memory)
    for step in range(5):
        if step == 3:
            torch.manual_seed(3)
            for i, block in enumerate(stack.blocks):
                block.steps[0].branch = Mlp()
                block.steps[1].couple(rg.couplings.Scaled(scale=-1.0))
                reference.pairs[i] = (copy.deepcopy(block.steps[0].branch), Negative(reference.pairs[i][1]))
        x, z = sample(4, 6, seed=step), sample(4, 6, seed=step)
        y, expected = stack(x), reference(z)
        loss_of(y).backward()
        loss_of(expected).backward()
        all_close([y, x.grad], [expected, z.grad])
    for block, (f, _) in zip(stack.blocks, reference.pairs, strict=True):
        all_close([p.grad for p in block.steps[0].branch.parameters()], [p.grad for p in f.parameters()])


class Negative(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return -self.inner(x)


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_streams_of_another_shape_layout_or_need_of_gradients_are_seen(memory: str) -> None:
    def scenario(model: Any) -> list[Any]:
        seen: list[Any] = []
        inputs = [sample(4, 6), sample(4, 6), sample(3, 5, 6), sample(6, 4).detach().t(), sample(4, 6, grad=False)]
        for x in [*inputs, *inputs]:
            y = model(x)
            loss_of(y).backward()
            seen += [y, x.grad]
        return seen

    agree(*twins(memory=memory), scenario)


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
def test_a_bias_that_was_none_in_earlier_calls_is_watched_like_any_other(memory: str) -> None:
    stack, _ = twins(Shifted, memory=memory)
    take_a_bias_away(branches_of(stack))
    for _ in range(2):
        stack(sample(4, 6)).sum().backward()
    bias = branches_of(stack)[0].outer.bias = nn.Parameter(sample(6, grad=False))
    y = stack(sample(4, 6))
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="edited between the forward pass and its backward pass"):
        y.sum().backward()


class Around:
    """A callable that is no module and holds one, as the branches of converted models do."""

    def __init__(self, scale: float = 1.0) -> None:
        self.module: Any = Mlp()
        self.scale: Any = scale
        self.generator: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x) * self.scale
        return out if self.generator is None else out * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def exchange_the_module(branch: Any) -> None:
    torch.manual_seed(7)
    branch.module = Mlp()


def exchange_a_part_of_it(branch: Any) -> None:
    torch.manual_seed(7)
    branch.module.outer = nn.Linear(7, 6).double()


def scale_by_a_tensor(branch: Any) -> None:
    branch.scale = torch.linspace(0.5, 1.5, 6).double()


def draw_from_a_generator(branch: Any) -> None:
    branch.generator = torch.Generator().manual_seed(3)


@pytest.mark.parametrize("memory", RECOMPUTING)
@pytest.mark.parametrize(
    "change", [exchange_the_module, exchange_a_part_of_it, scale_by_a_tensor, draw_from_a_generator]
)
def test_changes_of_a_callable_that_holds_a_module_are_seen(change: Callable[[Any], None], memory: str) -> None:
    torch.manual_seed(0)
    branches = [Around() for _ in range(4)]
    reference = copy.deepcopy(branches)
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    stack = rg.ReversibleSequence(blocks, merge=None, memory=memory_of(memory, 2))

    def plainly(x: Tensor) -> tuple[Tensor, Tensor]:
        a = b = x
        for f, g in zip(reference[::2], reference[1::2], strict=True):
            a = a + f(b)
            b = b + g(a)
        return a, b

    for step in range(6):
        if step == 3:
            for branch in (*branches, *reference):
                change(branch)
        x, y = sample(4, 6, seed=step), sample(4, 6, seed=step)
        ours, theirs = stack.run(x), plainly(y)
        for a, b in (ours, theirs):
            (a.sin() * b).sum().backward()
        all_close([x.grad], [y.grad])
        for mine, other in zip(branches, reference, strict=True):
            all_close([p.grad for p in mine.module.parameters()], [p.grad for p in other.module.parameters()])
