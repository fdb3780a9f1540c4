"""Accelerators of any kind: their random numbers and their autocast are replayed. Each is skipped where it is not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

KINDS = ("cuda", "xpu", "mps")


def missing(kind: str) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is None or found.type != kind or not torch.accelerator.is_available()


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.gpu) for kind in KINDS])
def device(request: pytest.FixtureRequest) -> torch.device:
    if missing(request.param):
        pytest.skip(f"no {request.param} on this machine")
    return torch.device(request.param)


def make(device: torch.device, dropout: float = 0.3, memory: str = "reverse") -> rg.ReversibleSequence:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(12)]
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    return rg.ReversibleSequence(blocks, memory=memory).to(device)  # type: ignore[arg-type]


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: str) -> list[Tensor]:
    torch.manual_seed(5)
    y = stack(x, memory=memory)  # type: ignore[arg-type]
    assert isinstance(y, Tensor)
    return list(torch.autograd.grad(y.float().square().sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("memory", ["checkpoint", "offload", "reverse"])
def test_dropout_on_a_device_is_replayed_with_the_mask_it_drew(device: torch.device, memory: str) -> None:
    stack, x = make(device), torch.randn(8, 16, device=device, requires_grad=True)
    for found, wanted in zip(gradients(stack, x, memory), gradients(stack, x, "store"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_backward_outside_autocast_replays_under_that_of_its_forward(
    device: torch.device, dtype: torch.dtype
) -> None:
    stack, x = make(device, dropout=0.0), torch.randn(8, 16, device=device, requires_grad=True)
    results = []
    for memory in ("checkpoint", "store"):
        with torch.autocast(device.type, dtype=dtype):
            y = stack(x, memory=memory)  # type: ignore[arg-type]
        assert isinstance(y, Tensor)
        results.append(torch.autograd.grad(y.float().square().sum(), list(stack.parameters())))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_device_generator_continues_as_if_there_had_been_no_replay(device: torch.device) -> None:
    stack, x = make(device), torch.randn(8, 16, device=device)
    after = []
    for memory in ("reverse", "store"):
        gradients(stack, x.clone().requires_grad_(), memory)
        after.append(torch.rand(4, device=device))
    assert torch.equal(*after)


def test_exact_streams_on_a_device_give_the_bits_of_stored_activations(device: torch.device) -> None:
    stack, x = make(device), torch.randn(8, 16, device=device, requires_grad=True)
    stack.exact = True
    for found, wanted in zip(gradients(stack, x, "reverse"), gradients(stack, x, "store"), strict=True):
        assert torch.equal(found, wanted)


def test_memory_on_a_device_does_not_grow_with_depth(device: torch.device) -> None:
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        pytest.skip(f"{device.type} does not tell its peak memory")

    def peak(depth: int, memory: str) -> int:
        blocks = [rg.two_stream(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(depth)]
        stack = rg.ReversibleSequence(blocks, memory=memory).to(device)  # type: ignore[arg-type]
        x = torch.randn(4096, 64, device=device, requires_grad=True)
        stack(x).sum().backward()
        torch.accelerator.synchronize()
        module.reset_peak_memory_stats()
        before: int = module.memory_allocated()
        stack(x).sum().backward()
        highest: int = module.max_memory_allocated()
        return highest - before

    assert peak(32, "reverse") < 1.1 * peak(4, "reverse")
    assert peak(32, "store") > 3 * peak(4, "store")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_device_lets_its_generator_be_read_and_set_in_the_way_we_do(kind: str) -> None:
    """What runs without the device: that torch's module for it takes the calls that `_randomness` makes."""
    module = torch.get_device_module(kind)
    device = torch.device(kind)
    inspect.signature(module.get_rng_state).bind(device)
    inspect.signature(module.set_rng_state).bind(torch.empty(0), device)


@pytest.mark.parametrize("memory", ["store", "checkpoint", "offload", "reverse"])
def test_a_stack_on_the_meta_device_keeps_shapes_and_draws_nothing(memory: str) -> None:
    """A device without values, and without a generator: as large models are sized."""
    stack = make(torch.device("meta"), memory=memory)
    before = torch.get_rng_state()
    y = stack(torch.empty(8, 16, device="meta"))
    assert isinstance(y, Tensor)
    assert (y.shape, y.device.type) == ((8, 16), "meta")
    y.sum().backward()
    assert {p.grad.device.type for p in stack.parameters() if p.grad is not None} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


def test_the_engine_calls_no_kind_of_device_by_its_own_module() -> None:
    """torch.accelerator and torch.get_device_module serve all kinds; torch.cuda would serve one."""
    package = Path(rg.__file__).parent
    rooms = ("couplings", "network", "engine", "compiled", "fused_optimizer")
    files = [*package.glob("*.py"), *(path for room in rooms for path in (package / room).glob("*.py"))]
    assert len(files) > 20
    named = [
        f"{f.name}: {hit}" for f in files for hit in re.findall(r"torch\.(?:cuda|xpu|mps)\b|\.cuda\(", f.read_text())
    ]
    assert not named
