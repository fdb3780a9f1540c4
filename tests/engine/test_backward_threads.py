"""Backward passes in a thread that is not the caller's, as on every accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from backward_threads import backward_in_threads
from retrograde.engine import rng_lock
from retrograde.engine.decisions import counting_flips
from stacks import RECOMPUTING, Mlp, Noisy, all_close, loss_of, sample, seed_all, twins

pytestmark = pytest.mark.backward_thread


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_backward_in_a_fresh_thread_gives_the_gradients_of_plain_autograd(memory: str) -> None:
    stack, reference = twins(Noisy, depth=5, memory=memory)
    results = []
    for model in (stack, reference):
        seed_all()
        x = sample(4, 6)
        with backward_in_threads() as threads:
            results.append(torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()]))
        assert threads
        assert threading.get_ident() not in threads
    all_close(*results)


class Descends(nn.Module):
    """Goes backward through an inner stack that draws, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = rg.ReversibleSequence([rg.two_stream(Noisy(), Noisy()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        start = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(self.inner(start)), start)
        return torch.tanh(x * slope.detach())


def test_a_branch_that_goes_backward_through_a_stack_that_draws_waits_for_no_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rng_lock, "LOCK_TIMEOUT_S", 3.0)
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(Descends(), Mlp()) for _ in range(2)])
    results = []
    for memory in ("reverse", "store"):
        seed_all()
        x = sample(4, 6)
        results.append(torch.autograd.grad(loss_of(stack(x, memory=memory)), x))
    all_close(*results)


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        chosen = rg.decide((x.sum(-1) * 2.0**50).round().long() % 2)
        return super().forward(x) * chosen[:, None]


def test_flips_are_counted_in_the_thread_of_the_backward_pass() -> None:
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(Chooses(6, 6).double(), Mlp()) for _ in range(3)])
    with counting_flips() as flips:
        loss_of(stack(sample(8, 6))).backward()
    assert flips.compared == 3 * 8


class Fails(Mlp):
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if rg.is_replaying() and self.error is not None:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("memory", RECOMPUTING)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no bytes left"), KeyboardInterrupt(), ValueError("wrong")], ids=type
)
def test_an_error_in_a_replay_reaches_the_caller_and_the_next_step_is_right(memory: str, error: BaseException) -> None:
    stack, reference = twins(Fails, depth=4, memory=memory)
    failing = [m for m in stack.modules() if isinstance(m, Fails)]
    for module in failing:
        module.error = error
    with pytest.raises(type(error)):
        loss_of(stack(sample(4, 6))).backward()
    for module in failing:
        module.error = None
    results = []
    for model in (stack, reference):
        x = sample(4, 6)
        results.append(torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()]))
    all_close(*results)


class Grows(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = super().forward(x)
        return result.sin() if rg.is_replaying() else result


def test_a_replay_that_saves_other_tensors_raises_from_another_thread_too() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Grows(), Grows()) for _ in range(3)])
    with pytest.raises(RuntimeError):
        loss_of(stack(sample(4, 6))).backward()


@pytest.fixture
def precision() -> Iterator[Callable[[], Any]]:
    yield lambda: torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def test_the_newer_settings_of_float32_products_are_those_of_the_forward_in_a_replay(
    precision: Callable[[], Any],
) -> None:
    seen: list[tuple[bool, Any]] = []

    class Looks(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            seen.append((rg.is_replaying(), precision()))
            result: Tensor = super().forward(x)
            return result

    stack = rg.ReversibleSequence([rg.two_stream(Looks(), Looks()) for _ in range(2)])
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    loss = loss_of(stack(sample(4, 6)))
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    loss.backward()
    assert any(replays for replays, _ in seen)
    assert {setting for _, setting in seen} == {"bf16"}
    assert precision() == "ieee"
