"""Bytes on an accelerator: what the modes hold there, what offload moves and when, what the planner counts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine import saved_streams
from retrograde.measure import MemoryTracker, default_loss, device_memory, free_memory, timing
from retrograde.planning import ChainCost, measure, predict

STREAM = 256 * 64 * 4
"""The bytes of one stream of `make` below."""


def make(device: torch.device, depth: int, memory: Any = "reverse", **options: Any) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    blocks = [rg.two_stream(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(depth)]
    stack = rg.ReversibleSequence(blocks, memory=memory, **options).to(device)
    for parameter in stack.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return stack


def step(stack: rg.ReversibleSequence, x: Tensor) -> None:
    y = stack(x)
    y.backward(torch.ones_like(y))
    x.grad = None


def peak(device: torch.device, depth: int, memory: str) -> int:
    """The most bytes of a training step, beyond those of the weights and the input."""
    stack, x = make(device, depth, memory), torch.randn(256, 64, device=device, requires_grad=True)
    step(stack, x)
    gc.collect()
    device_memory.reset_peak(device)
    before = device_memory.allocated(device)
    step(stack, x)
    return device_memory.peak(device) - before


@pytest.mark.parametrize("memory", ["reverse", "offload"])
def test_memory_on_a_device_does_not_grow_with_depth(device: torch.device, memory: str) -> None:
    assert peak(device, 16, memory) <= 1.05 * peak(device, 4, memory)
    assert peak(device, 16, "store") > 3 * peak(device, 4, "store")


@contextmanager
def noting_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many blocks' inputs that were copied back are on the device, each time that one more is."""
    alive, numbers = weakref.WeakSet[Any](), list[int]()
    copy_back = saved_streams.OffloadedStreams.tensors

    def noted(saved: Any) -> Any:
        tensors = copy_back(saved)
        alive.add(tensors[0].untyped_storage())
        numbers.append(len(alive))
        return tensors

    monkeypatch.setattr(saved_streams.OffloadedStreams, "tensors", noted)
    yield numbers
    monkeypatch.undo()


def test_offload_holds_at_most_two_blocks_on_the_device(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, x = make(torch.device("toy"), 8, "offload"), torch.randn(256, 64, device="toy", requires_grad=True)
    with noting_what_comes_back(monkeypatch) as numbers:
        for _ in range(2):
            step(stack, x)
    assert len(numbers) == 2 * 8
    assert max(numbers) <= 2


def test_between_the_passes_offload_leaves_only_the_output_on_the_device(toy: Any) -> None:
    stack, x = make(torch.device("toy"), 8, "offload"), torch.randn(256, 64, device="toy", requires_grad=True)
    step(stack, x)
    before = toy.allocated
    y = stack(x)
    assert toy.allocated - before <= 6 * STREAM  # the output, and the last step's graph
    y.backward(torch.ones_like(y))
    x.grad = y = None
    assert toy.allocated == before


@pytest.mark.parametrize("can_pin", [True, False])
def test_offload_copies_each_stream_there_and_back_once(toy: Any, can_pin: bool) -> None:
    """A device that pins no host memory is waited for once per stream, and gets the same gradients."""
    saved_streams._can_pin.cache_clear()
    stack, x = make(torch.device("toy"), 4, "offload"), torch.randn(256, 64, device="toy", requires_grad=True)
    toy.reset()
    toy.can_pin = can_pin
    weight = next(stack.parameters())
    (found,) = torch.autograd.grad(stack(x).sum(), weight)
    saved_streams._can_pin.cache_clear()
    assert (toy.counts["to_host"], toy.counts["to_device"]) == (8, 8)
    assert toy.counts["waits"] == (0 if can_pin else 8)
    (wanted,) = torch.autograd.grad(stack(x, memory="store").sum(), weight)
    torch.testing.assert_close(found.cpu(), wanted.cpu())


def test_a_backward_on_another_stream_waits_on_the_device_for_what_the_forward_copied(toy: Any) -> None:
    stack, x = make(torch.device("toy"), 4, "offload"), torch.randn(256, 64, device="toy", requires_grad=True)
    first, second = toy.stream, type(toy.stream)()
    weight = next(stack.parameters())  # whose gradient needs what was copied
    y = stack(x)
    toy.stream = second
    (found,) = torch.autograd.grad(y.sum(), weight)
    toy.stream = first
    assert toy.counts["waits"] == 0
    (wanted,) = torch.autograd.grad(stack(x, memory="store").sum(), weight)
    torch.testing.assert_close(found.cpu(), wanted.cpu())
    assert toy.log.index("event.record") < toy.log.index("event.wait")


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse", "selective"])
def test_the_tracker_counts_the_bytes_that_the_device_counts(toy: Any, memory: str) -> None:
    stack, x = make(torch.device("toy"), 6, memory), torch.randn(256, 64, device="toy", requires_grad=True)
    step(stack, x)
    gc.collect()
    toy.reset()
    before = toy.allocated
    with MemoryTracker(ignore=[stack, x]) as tracker:
        step(stack, x)
    assert tracker.peak == toy.peak - before


@pytest.fixture(scope="module")
def planned() -> tuple[rg.ReversibleSequence, Tensor, ChainCost]:
    """A stack and a batch on the toy device, and what the planner measured of them."""
    stack, x = make(torch.device("toy"), 6), torch.randn(256, 64, device="toy")
    for parameter in stack.parameters():
        parameter._post_accumulate_grad_hooks.clear()  # the planner counts the gradients that a step leaves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_PATIENCE", 0.0)
        return stack, x, measure(stack, x)


@pytest.mark.parametrize("memory", ["store", "checkpoint", "offload", "reverse"])
def test_the_planner_predicts_the_bytes_that_the_device_counts(
    toy: Any, memory: str, planned: tuple[rg.ReversibleSequence, Tensor, ChainCost]
) -> None:
    stack, x, costs = planned
    predicted = predict(costs, costs.uniform()[memory]).peak
    stack.memory = memory
    stack.zero_grad()
    gc.collect()
    toy.reset()
    before = toy.allocated
    default_loss(stack(x)).backward()
    assert toy.peak - before == pytest.approx(predicted, rel=0.02)


def test_the_planner_offloads_where_the_device_is_full(
    toy: Any, planned: tuple[rg.ReversibleSequence, Tensor, ChainCost]
) -> None:
    """Without "reverse", only "offload" holds fewer bytes than checkpoints do: the host's are not counted."""
    _, _, costs = planned
    peaks = {mode: predict(costs, plan).peak for mode, plan in costs.uniform().items()}
    assert peaks["offload"] <= peaks["checkpoint"] - 7 * STREAM


def test_the_free_bytes_of_a_device_are_those_that_its_limit_leaves(toy: Any) -> None:
    toy.limit = toy.allocated + 1000
    assert free_memory.free_bytes(torch.device("toy")) == 1000
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1001, dtype=torch.int8, device="toy")
