"""The engine on an accelerator: gradients, random numbers, autocast, exactness, memory, and waits of the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

RECOMPUTING = ("checkpoint", "offload", "reverse", "selective")


def make(device: torch.device, dropout: float = 0.3, depth: int = 6, **options: Any) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(2 * depth)]
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    return rg.ReversibleSequence(blocks, **options).to(device)


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: Any) -> list[Tensor]:
    torch.manual_seed(5)
    y = stack(x, memory=memory)
    assert isinstance(y, Tensor)
    return list(torch.autograd.grad(y.float().square().sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_dropout_on_a_device_is_replayed_with_the_mask_it_drew(device: torch.device, memory: str) -> None:
    stack, x = make(device), torch.randn(8, 16, device=device, requires_grad=True)
    for _ in range(3):  # a first call, and those that know the branches
        for found, wanted in zip(gradients(stack, x, memory), gradients(stack, x, "store"), strict=True):
            torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("memory", RECOMPUTING)
@pytest.mark.parametrize("exact", [False, True], ids=["ordinary", "exact"])
def test_the_host_waits_once_per_exact_call_and_never_in_others(toy: Any, memory: str, exact: bool) -> None:
    device = torch.device("toy")
    stack, x = make(device, exact=exact), torch.randn(8, 16, device=device, requires_grad=True)
    for _ in range(4):
        toy.reset()
        y = stack(x, memory=memory)
        y.backward(torch.ones_like(y))
        assert toy.counts["waits"] == exact, toy.log


def test_a_stack_on_a_device_has_the_gradients_of_the_cpu(device: torch.device) -> None:
    stack, x = make(torch.device("cpu"), dropout=0.0, exact=True), torch.randn(8, 16)
    wanted = gradients(stack, x.requires_grad_(), "store")
    moved = stack.to(device)
    for memory in RECOMPUTING:
        there = x.detach().to(device).requires_grad_()
        for found, expected in zip(gradients(moved, there, memory), wanted, strict=True):
            assert found.device.type == device.type
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_backward_outside_autocast_replays_under_that_of_its_forward(
    device: torch.device, dtype: torch.dtype, memory: str
) -> None:
    stack, x = make(device, exact=True), torch.randn(8, 16, device=device, requires_grad=True)
    results = []
    for mode in (memory, "store", "none"):
        torch.manual_seed(5)
        with torch.autocast(device.type, dtype=dtype, enabled=mode != "none"):
            y = stack(x, memory="store" if mode == "none" else mode)
        results.append(torch.autograd.grad(y.float().square().sum(), [x, *stack.parameters()]))
    for found, wanted, other in zip(*results, strict=True):
        assert torch.equal(found, wanted)
        assert not torch.equal(found, other)  # which shows that autocast did something


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_the_device_generator_continues_as_if_there_had_been_no_replay(device: torch.device, memory: str) -> None:
    stack, x = make(device), torch.randn(8, 16, device=device)
    after = []
    for mode in (memory, "store"):
        gradients(stack, x.clone().requires_grad_(), mode)
        after.append((torch.rand(4, device=device).cpu(), torch.rand(4)))
    for found, wanted in zip(*after, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_exact_streams_on_a_device_give_the_bits_of_stored_activations(device: torch.device, memory: str) -> None:
    stack, x = make(device, exact=True), torch.randn(8, 16, device=device, requires_grad=True)
    for found, wanted in zip(gradients(stack, x, memory), gradients(stack, x, "store"), strict=True):
        assert torch.equal(found, wanted)


def test_an_exact_stack_on_a_device_takes_a_coarser_grid_and_saves_it(device: torch.device) -> None:
    stack, x = make(device, dropout=0.0), 3000 * torch.randn(8, 16, device=device)
    stack = rg.ReversibleSequence(list(stack), exact=True, grid_bits=18, overflow="rescale").to(device)
    with pytest.warns(RuntimeWarning, match="continues with a grid"):
        stack(x).sum().backward()
    other = rg.ReversibleSequence(list(make(device, dropout=0.0)), exact=True, grid_bits=18).to(device)
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other(x), stack(x))


def test_buffers_on_a_device_are_updated_once(device: torch.device) -> None:
    def make_normed() -> rg.ReversibleSequence:
        torch.manual_seed(0)
        blocks = [rg.two_stream(nn.BatchNorm1d(16), nn.BatchNorm1d(16)) for _ in range(3)]
        return rg.ReversibleSequence(blocks).to(device)

    x, results = torch.randn(8, 16, device=device), []
    for memory in ("reverse", "store"):
        stack = make_normed()
        for _ in range(3):
            stack(x, memory=memory).sum().backward()
        results.append([t.cpu() for t in (*stack.buffers(), *(p.grad for p in stack.parameters()))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Routed(nn.Module):
    """Chooses an expert for each row by digits that rounding changes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = rg.decide((x.sum(-1) * 2.0**20).round().long() % 4)
        return torch.einsum("bw,bwv->bv", x, self.experts[chosen]).tanh()


def test_decisions_on_a_device_are_reused_by_the_replay(device: torch.device) -> None:
    torch.manual_seed(0)
    blocks = [rg.two_stream(Routed(), nn.Linear(16, 16)) for _ in range(6)]
    stack, x = rg.ReversibleSequence(blocks).to(device), torch.randn(32, 16, device=device, requires_grad=True)
    for found, wanted in zip(gradients(stack, x, "reverse"), gradients(stack, x, "store"), strict=True):
        torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-3, atol=1e-3)


def test_context_on_a_device_gets_its_gradient(device: torch.device) -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    torch.manual_seed(0)
    blocks = [rg.two_stream(Shifted(16, 16), nn.Linear(16, 16)) for _ in range(3)]
    stack, x = rg.ReversibleSequence(blocks).to(device), torch.randn(8, 16, device=device)
    results = []
    for memory in ("reverse", "store"):
        shift = torch.ones(16, device=device, requires_grad=True)
        stack(x, memory=memory, shift=shift).square().sum().backward()
        results.append(shift.grad.cpu())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_fused_optimiser_steps_on_a_device_as_an_ordinary_one_does(device: torch.device) -> None:
    x, results = torch.randn(8, 16, device=device), []
    for fused in (True, False):
        stack = make(device, dropout=0.0)
        make_optimizer: Any = partial(rg.FusedOptimizer, torch.optim.SGD) if fused else torch.optim.SGD
        optimizer = make_optimizer(stack.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            stack(x).square().mean().backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in stack.parameters()])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_decisions_make_the_host_wait_for_nothing(toy: Any) -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Routed(), nn.Linear(16, 16)) for _ in range(3)]).to("toy")
    x = torch.randn(8, 16, device="toy", requires_grad=True)
    for _ in range(3):
        y = stack(x)
        y.backward(torch.ones_like(y))
    assert toy.counts["waits"] == 0, toy.log
