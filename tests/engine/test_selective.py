"""Partial replay: what a step keeps is not computed again, and gradients do not know of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy

import retrograde as rg
from retrograde.measure import MemoryTracker
from stacks import Plain, agree, loss_of, sample

ATEN = torch.ops.aten
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default
PRODUCTS = (ATEN.mm.default, ATEN.addmm.default)
DEPTH = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16).double(), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8).double())


class Counting(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))

    def of(self, *operators: Any) -> int:
        return sum(self.counts.get(operator, 0) for operator in operators)


def only_mm(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


KEEPS: dict[str, Any] = {"attention": "attention", "products": "products", "operators": PRODUCTS, "policy": only_mm}


def pairs() -> list[tuple[nn.Module, nn.Module]]:
    torch.manual_seed(0)
    return [(Attention(), Mlp()) for _ in range(DEPTH)]


def stack_of(keeps: Any, memory: str = "selective") -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(f, g, save_ops=keeps) for f, g in pairs()], memory=memory)


@pytest.mark.parametrize("keeps", KEEPS)
def test_gradients_are_those_of_plain_autograd_with_dropout_too(keeps: str) -> None:
    def scenario(model: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            x = sample(2, 5, 8, seed=step)
            y = model(x)
            loss_of(y).backward()
            seen += [y, x.grad]
        return seen

    agree(stack_of(KEEPS[keeps]), Plain(pairs()), scenario)


def replayed(keeps: Any, memory: str = "selective") -> Counting:
    """What ran in the backward pass."""
    stack = stack_of(keeps, memory)
    loss = loss_of(stack(sample(2, 5, 8)))
    with Counting() as counting:
        loss.backward()
    return counting


def test_what_is_saved_is_not_recomputed() -> None:
    reverse, store = replayed("attention", "reverse"), replayed("attention", "store")
    attention, products = replayed("attention"), replayed("products")
    again = DEPTH  # the last step, an Mlp, keeps its graph: every attention runs again
    assert store.of(ATTENTION) == 0
    assert reverse.of(ATTENTION) == again
    assert attention.of(ATTENTION) == products.of(ATTENTION) == 0
    assert attention.of(*PRODUCTS) == reverse.of(*PRODUCTS) > store.of(*PRODUCTS)
    assert products.of(*PRODUCTS) == store.of(*PRODUCTS)
    assert replayed(PRODUCTS).of(ATTENTION) == again


def test_what_is_saved_costs_its_bytes_until_the_backward_pass() -> None:
    held = {}
    for keeps, memory in (("attention", "reverse"), ("attention", "selective"), ("products", "selective")):
        stack, x = stack_of(keeps, memory), sample(2, 5, 8)
        stack(x).sum().backward()
        with MemoryTracker() as tracker:
            y = stack(x)
            held[keeps, memory] = tracker.live
        del y
    first, second, third = held.values()
    assert first < second < third


class Looking:
    """Sees which branches run under a context that keeps results."""

    def __init__(self, stack: rg.ReversibleSequence) -> None:
        self.runs: list[bool] = []
        for step in stack.blocks[0].each_step():
            step.branch.register_forward_pre_hook(lambda *_: self.runs.append(_is_kept()))

    def of(self, stack: rg.ReversibleSequence, x: Tensor) -> list[bool]:
        self.runs.clear()
        loss_of(stack(x)).backward()
        return self.runs.copy()


def _is_kept() -> bool:
    return any(type(mode).__name__.startswith("_Cach") for mode in _get_current_dispatch_mode_stack())


def test_a_branch_that_has_nothing_to_save_is_looked_at_once() -> None:
    """Under torch's contexts every operator is seen by Python, which costs small branches half their time again."""
    stack, x = stack_of("attention"), sample(2, 5, 8)
    looking = Looking(stack)
    assert looking.of(stack, x) == [True] * 4  # forward: attention, Mlp; backward: Mlp, attention
    assert looking.of(stack, x) == [True, False, False, True]
    stack.blocks[0].steps[1].save_ops = "products"
    assert looking.of(stack, x) == [True, True, True, True]
    assert looking.of(stack, x) == [True, True, True, True]


def test_a_branch_that_changed_is_looked_at_once_more() -> None:
    stack, x = stack_of("attention"), sample(2, 5, 8)
    looking = Looking(stack)
    looking.of(stack, x)
    assert looking.of(stack, sample(2, 6, 8)) == [True] * 4, "other shapes may run other operators"
    assert looking.of(stack, x) == [True, False, False, True], "these did not"
    mixing = stack.blocks[0].steps[1]
    mixing.branch.append(Attention())
    assert looking.of(stack, x) == [True, True, True, True], "the branch has attention now"
    with Counting() as counting:
        looking.of(stack, x)
    assert counting.of(ATTENTION) == DEPTH + 1


def test_a_policy_of_ones_own_is_asked_every_time() -> None:
    calls: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        calls.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    stack, x = stack_of(policy), sample(2, 5, 8)
    loss_of(stack(x)).backward()
    once = len(calls)
    loss_of(stack(x)).backward()
    assert len(calls) == 2 * once > 0


def test_what_is_saved_is_freed_without_the_garbage_collector() -> None:
    stack, x = stack_of("products"), sample(2, 5, 8)
    loss_of(stack(x)).backward()
    gc.collect()
    gc.disable()
    try:
        with MemoryTracker() as tracker:
            y = stack(x)
            assert tracker.live > 2 * y.nbytes
            del y
            assert tracker.live == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("keeps", ["everything", 3.5, [torch.mm]])
def test_what_says_nothing_about_what_to_keep_is_refused(keeps: Any) -> None:
    with pytest.raises(ValueError, match=r"save_ops=.* is not known"):
        rg.Step(nn.Linear(4, 4), 0, (1,), save_ops=keeps)
