"""What only an accelerator shows: backward passes in autograd's own thread, and draws where no stream is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine import rng_lock
from retrograde.engine.decisions import counting_flips


class DrawsElsewhere(nn.Linear):
    """Draws on the accelerator, whatever device its input is on."""

    def forward(self, x: Tensor) -> Tensor:
        device = torch.accelerator.current_accelerator()
        return super().forward(x) * torch.rand(x.shape, device=device).to(x.device)


@pytest.mark.parametrize("memory", ["checkpoint", "offload", "reverse", "selective"])
def test_a_draw_on_a_device_that_no_stream_is_on_is_replayed(device: torch.device, memory: str) -> None:
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(DrawsElsewhere(8, 8), DrawsElsewhere(8, 8)) for _ in range(4)])
    torch.zeros(1, device=device)  # the accelerator is in use
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        results = []
        for mode in (memory, "store"):
            torch.manual_seed(5)
            results.append(torch.autograd.grad(stack(x, memory=mode).square().sum(), [x, *stack.parameters()]))
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Descends(nn.Module):
    """Goes backward through an inner stack that draws, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        noisy = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4)]
        self.inner = rg.ReversibleSequence([rg.two_stream(*noisy[:2]), rg.two_stream(*noisy[2:])])

    def forward(self, x: Tensor) -> Tensor:
        start = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(start).square().sum(), start)
        return torch.tanh(x * slope.detach())


def test_a_branch_that_goes_backward_in_its_forward_waits_for_no_lock_on_a_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng_lock, "LOCK_TIMEOUT_S", 1e4)  # an error in autograd's thread would end the process
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(Descends(), nn.Linear(8, 8)) for _ in range(2)]).to(device)
    x, results = torch.randn(4, 8, device=device, requires_grad=True), []
    for memory in ("reverse", "store"):
        torch.manual_seed(5)
        results.append(torch.autograd.grad(stack(x, memory=memory).square().sum(), x)[0].cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * rg.decide((x.sum(-1) > 0).long())[:, None]


def test_flips_on_a_device_are_counted_in_autograds_thread(device: torch.device) -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Chooses(8, 8), nn.Linear(8, 8)) for _ in range(3)]).to(device)
    with counting_flips() as flips:
        stack(torch.randn(4, 8, device=device)).sum().backward()
    assert flips.compared == 3 * 4


def test_a_clock_waits_for_the_device_by_the_call_that_every_kind_of_device_has(toy: Any) -> None:
    from retrograde.measure import timing

    timing.wait_for_devices([torch.zeros(1, device="toy")])
    assert toy.counts["waits"] == 1
