"""Low precision: autocast in all its forms, gradient scaling, float32 streams around branches of fewer bits.

The reference is a plain loop with the same casts. Updates lie on a grid on which sums are exact, so that a recomputed
stream is the first one to the bit, and so must the gradients be.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import MEMORIES, agree, loss_of, memory_of, sample, twins, twins_of

every_memory = pytest.mark.parametrize("memory", MEMORIES)
LOW = (torch.bfloat16, torch.float16)


def on_grid(x: Tensor) -> Tensor:
    return (x * 64).round() / 64


def grid_sample(seed: int = 1) -> Tensor:
    return on_grid(sample(4, 6, seed=seed, dtype=torch.float32).detach()).requires_grad_()


class Low(nn.Module):
    """Two linear layers, each in a region of its own; notes the dtypes in which they ran."""

    def __init__(
        self,
        inner: Callable[[], AbstractContextManager[Any]] = nullcontext,
        outer: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.regions = inner, outer
        self.dtypes: set[tuple[torch.dtype, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        with self.regions[0]():
            h = self.first(x)
            with self.regions[1]():
                u = self.second(torch.tanh(h).to(self.second.weight.dtype))
        self.dtypes.add((h.dtype, u.dtype))
        u = u.float()
        return u + (on_grid(u) - u).detach()


def dtypes_in(model: nn.Module) -> set[tuple[torch.dtype, torch.dtype]]:
    return set().union(*(m.dtypes for m in model.modules() if isinstance(m, Low)))


def cast(dtype: torch.dtype, *, enabled: bool = True) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype=dtype, enabled=enabled)


NESTED = {
    "another dtype inside": (cast(torch.bfloat16), nullcontext, cast(torch.float16), (torch.bfloat16, torch.float16)),
    "disabled inside": (
        cast(torch.bfloat16),
        nullcontext,
        cast(torch.bfloat16, enabled=False),
        (torch.bfloat16, torch.float32),
    ),
    "disabled in the branch, and on again": (
        cast(torch.bfloat16),
        cast(torch.bfloat16, enabled=False),
        cast(torch.float16),
        (torch.float32, torch.float16),
    ),
    "in the branch alone": (nullcontext, cast(torch.float16), nullcontext, (torch.float16, torch.float16)),
}


@every_memory
@pytest.mark.parametrize("dtype", LOW)
def test_autocast_to_either_type_is_replayed_and_leaves_the_streams_in_float32(memory: str, dtype: torch.dtype) -> None:
    def scenario(model: Any) -> Any:
        x = grid_sample()
        with torch.autocast("cpu", dtype=dtype):
            y = model(x)
        loss_of(y).backward()
        assert dtypes_in(model) == {(dtype, dtype)}
        assert y.dtype == torch.float32
        return y, x.grad

    agree(*twins(Low, memory=memory), scenario, tolerance=0)


@every_memory
@pytest.mark.parametrize("regions", NESTED)
def test_nested_and_disabled_autocast_regions_are_replayed_as_they_were(memory: str, regions: str) -> None:
    around, inner, outer, expected = NESTED[regions]

    def scenario(model: Any) -> Any:
        x = grid_sample()
        with around():
            y = model(x)
        with torch.autocast("cpu", dtype=torch.float16):  # the backward's own, which no replay may see
            loss_of(y).backward()
        assert dtypes_in(model) == {expected}
        return y, x.grad

    agree(*twins(lambda: Low(inner, outer), memory=memory), scenario, tolerance=0)


@every_memory
@pytest.mark.parametrize("dtype", LOW)
def test_a_stack_inside_a_disabled_region_computes_in_full_precision(memory: str, dtype: torch.dtype) -> None:
    def scenario(model: Any) -> Any:
        x = grid_sample()
        with torch.autocast("cpu", dtype=dtype):
            before = torch.nn.functional.linear(x, torch.eye(6))
            with torch.autocast("cpu", enabled=False):
                y = model(on_grid(before.float()))
            loss_of(y).backward()
        assert dtypes_in(model) == {(torch.float32, torch.float32)}
        return y, x.grad

    agree(*twins(Low, memory=memory), scenario, tolerance=0)


@every_memory
def test_a_grad_scaler_with_float16_autocast_steps_and_skips_as_in_plain_autograd(memory: str) -> None:
    def scenario(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model(grid_sample(seed=step)).float())
            scaler.scale(loss * 2.0**120 if step == 1 else loss).backward()  # overflows in float16
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[1] < scales[0] < scales[3]
        return scales, list(model.parameters())

    agree(*twins(Low, memory=memory), scenario, tolerance=0)


class InLow(nn.Module):
    """The plain loop's branch with the casts that `compute` makes."""

    def __init__(self, branch: Low, dtype: torch.dtype) -> None:
        super().__init__()
        self.branch, self.dtype = branch, dtype

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.branch(x.to(self.dtype))
        return update


@every_memory
@pytest.mark.parametrize("dtype", LOW)
def test_branches_compute_in_few_bits_inside_streams_of_float32(memory: str, dtype: torch.dtype) -> None:
    """`stream_dtype` and `compute`: input and weights of few bits, streams of many."""
    torch.manual_seed(0)
    branches = [Low().to(dtype) for _ in range(6)]
    pairs = list(zip(branches[::2], branches[1::2], strict=True))
    _, reference = twins_of([(InLow(f, dtype), InLow(g, dtype)) for f, g in pairs])
    blocks = [rg.two_stream(f, g, compute=dtype) for f, g in pairs]
    stack = rg.ReversibleSequence(blocks, stream_dtype=torch.float32, memory=memory_of(memory, 3))
    assert {stream.dtype for stream in stack.run(grid_sample())} == {torch.float32}

    def scenario(model: Any) -> Any:
        streams = [grid_sample(seed).detach().to(dtype).requires_grad_() for seed in (1, 2)]
        y = model(streams if model is stack else [stream.float() for stream in streams]).to(dtype)
        y.float().square().sum().backward()
        assert dtypes_in(model) == {(dtype, dtype)}
        return y, [stream.grad for stream in streams]

    agree(stack, reference, scenario, tolerance=0)


def relative_error(stream_dtype: torch.dtype) -> float:
    """By how much the gradient of a deep stack's input differs between reversing and storing."""
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).bfloat16() for _ in range(64)]
    blocks = [rg.two_stream(f, g, compute=torch.bfloat16) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    stack = rg.ReversibleSequence(blocks, stream_dtype=stream_dtype)
    x = torch.randn(8, 16).bfloat16().requires_grad_()
    grads = []
    for memory in ("reverse", "store"):
        y = stack(x, memory=memory)  # type: ignore[arg-type]
        assert isinstance(y, Tensor)
        grads.append(torch.autograd.grad(y.float().square().sum(), x)[0].float())
    return ((grads[0] - grads[1]).norm() / grads[1].norm()).item()


def test_float32_streams_around_bfloat16_branches_drift_far_less_than_bfloat16_streams() -> None:
    assert relative_error(torch.float32) < 0.1 * relative_error(torch.bfloat16)


def scaled_mm_works() -> bool:
    """Whether this machine's accelerator multiplies float8 matrices."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


class Float8(nn.Module):
    """A linear layer whose product is taken in float8, forward and, by straight-through, not backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.nn.functional.linear(x, self.weight)
        one = torch.ones((), device=x.device)
        low = torch._scaled_mm(
            x.to(torch.float8_e4m3fn), self.weight.to(torch.float8_e4m3fn).t(), one, one, out_dtype=torch.bfloat16
        )
        return wide + (low.to(x.dtype) - wide).detach()


@pytest.mark.gpu
@pytest.mark.skipif(not scaled_mm_works(), reason="no float8 products on this machine")
def test_float8_products_in_branches_are_replayed() -> None:
    torch.manual_seed(0)
    blocks = [rg.two_stream(Float8(), Float8()) for _ in range(4)]
    stack = rg.ReversibleSequence(blocks, exact=True).to("cuda")
    x = torch.randn(32, 32, device="cuda", requires_grad=True)
    grads = []
    for memory in ("reverse", "store"):
        y = stack(x, memory=memory)  # type: ignore[arg-type]
        assert isinstance(y, Tensor)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *stack.parameters()]))
    for found, wanted in zip(*grads, strict=True):
        assert torch.equal(found, wanted)


@every_memory
def test_branches_that_round_through_float8_are_replayed_to_the_bit(memory: str) -> None:
    """Casts to float8 and back run anywhere."""

    class Rounding(Low):
        def forward(self, x: Tensor) -> Tensor:
            low = x.to(torch.float8_e4m3fn).float()
            return super().forward(x + (low - x).detach())

    def scenario(model: Any) -> Any:
        x = grid_sample()
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Rounding, memory=memory), scenario, tolerance=0)
