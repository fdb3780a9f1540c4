"""Accelerators: their random numbers and their autocast are replayed. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

pytestmark = pytest.mark.gpu


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def make(dropout: float = 0.3, memory: str = "reverse") -> rg.ReversibleSequence:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(12)]
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    return rg.ReversibleSequence(blocks, memory=memory).to(device())  # type: ignore[arg-type]


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: str) -> list[Tensor]:
    torch.manual_seed(5)
    y = stack(x, memory=memory)  # type: ignore[arg-type]
    assert isinstance(y, Tensor)
    return list(torch.autograd.grad(y.float().square().sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
def test_dropout_on_a_device_is_replayed_with_the_mask_it_drew(memory: str) -> None:
    stack, x = make(), torch.randn(8, 16, device=device(), requires_grad=True)
    for found, wanted in zip(gradients(stack, x, memory), gradients(stack, x, "store"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_backward_outside_autocast_replays_under_that_of_its_forward(dtype: torch.dtype) -> None:
    stack, x = make(dropout=0.0), torch.randn(8, 16, device=device(), requires_grad=True)
    results = []
    for memory in ("checkpoint", "store"):
        with torch.autocast(device().type, dtype=dtype):
            y = stack(x, memory=memory)  # type: ignore[arg-type]
        assert isinstance(y, Tensor)
        results.append(torch.autograd.grad(y.float().square().sum(), list(stack.parameters())))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_device_generator_goes_on_as_if_there_had_been_no_replay() -> None:
    stack, x = make(), torch.randn(8, 16, device=device())
    after = []
    for memory in ("reverse", "store"):
        gradients(stack, x.clone().requires_grad_(), memory)
        after.append(torch.rand(4, device=device()))
    assert torch.equal(*after)


def test_memory_on_a_device_does_not_grow_with_depth() -> None:
    def peak(depth: int, memory: str) -> int:
        blocks = [rg.two_stream(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(depth)]
        stack = rg.ReversibleSequence(blocks, memory=memory).to(device())  # type: ignore[arg-type]
        x = torch.randn(4096, 64, device=device(), requires_grad=True)
        stack(x).sum().backward()
        torch.accelerator.synchronize()
        module = torch.get_device_module(device())
        module.reset_peak_memory_stats()
        before: int = module.memory_allocated()
        stack(x).sum().backward()
        highest: int = module.max_memory_allocated()
        return highest - before

    assert peak(32, "reverse") < 1.1 * peak(4, "reverse")
    assert peak(32, "store") > 3 * peak(4, "store")
