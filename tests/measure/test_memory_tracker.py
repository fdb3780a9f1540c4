"""The memory tracker: every byte of live tensors, with torch's profiler as the truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from measured import SHAPE, STREAM, Attention, dropping_gradients, loss_of, measure, stack
from retrograde.measure import Event, MemoryTracker, holdings


class Truth(NamedTuple):
    saved: int
    backward_peak: int
    around: str
    """The operators that were running at the peak."""


def profiled(model: nn.Module, trace: Path) -> Truth:
    """What `measure` measures, by the allocator's own events."""

    def run(action: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = action()
        profiler.export_chrome_trace(str(trace))
        return result, sorted(json.loads(trace.read_text())["traceEvents"], key=lambda e: e["ts"])

    x = torch.randn(SHAPE, requires_grad=True)
    loss, events = run(lambda: loss_of(model, x))
    live = peak = saved = sum(e["args"]["Bytes"] for e in events if e["name"] == "[memory]")
    _, events = run(loss.backward)
    when = 0.0
    for event in events:
        if event["name"] == "[memory]":
            live += event["args"]["Bytes"]
            peak, when = max((peak, when), (live, event["ts"]))
    around = [e["name"] for e in events if e.get("ph") == "X" and e["ts"] <= when <= e["ts"] + e["dur"]]
    return Truth(saved, peak, " ".join(around))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_the_tracker_and_the_profiler_count_the_same_bytes(memory: str, tmp_path: Path) -> None:
    model = stack(3, memory)
    measured, truth = measure(model), profiled(model, tmp_path / "trace.json")
    assert (measured.held, measured.backward_peak) == (truth.saved, truth.backward_peak)


def test_the_tracker_misses_only_what_a_kernel_frees_before_it_returns(tmp_path: Path) -> None:
    """SDPA's backward kernel takes memory for itself; alone, without an MLP beside it, attention peaks there."""
    model = dropping_gradients(Attention())
    measured, truth = measure(model), profiled(model, tmp_path / "trace.json")
    assert measured.held == truth.saved
    assert measured.backward_peak < truth.backward_peak < measured.backward_peak + STREAM + 1024
    assert "flash_attention_for_cpu_backward" in truth.around


def test_the_tracker_sees_gradients_added_out_of_place_where_autograd_alone_adds_in_place(tmp_path: Path) -> None:
    """Any dispatch mode makes autograd do so: the peak at such a sum is over by one gradient, and never under."""

    class Fan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.neg()
            return x.neg() + x.neg() + x.neg()

    measured, truth = measure(Fan()), profiled(Fan(), tmp_path / "trace.json")
    assert measured.held == truth.saved
    assert measured.backward_peak - truth.backward_peak == STREAM


def test_the_tracker_counts_a_storage_once_however_many_views_it_has() -> None:
    weight = torch.randn(8, 8)
    with MemoryTracker() as memory:
        views = [weight.t(), weight[2:], weight.detach(), weight.view(-1)]
        assert memory.live == 0
        made = weight * 2
        views += [made.t(), made[:3], made.expand(5, 8, 8)]
        assert memory.live == made.nbytes
        del made
        assert memory.live == 256
        del views
        assert (memory.live, memory.peak) == (0, 256)


def test_the_tracker_ignores_what_it_is_told_to() -> None:
    layer = nn.Linear(4, 4)
    with MemoryTracker(ignore=[layer]) as memory:
        layer(torch.ones(2, 4)).sum().backward()
        assert memory.live == 64 + 16
        memory.ignore(layer)
        assert memory.live == 0
        layer.zero_grad()
    assert memory.live == 0


def test_the_tracker_follows_a_storage_that_is_resized() -> None:
    with MemoryTracker() as memory:
        x = torch.empty(4)
        x.resize_(100)
        assert memory.live == 400
        x.untyped_storage().resize_(40)
        x[:5].zero_()
        assert memory.live == 40


def test_the_tracker_sees_a_storage_freed_and_reallocated_without_an_operator() -> None:
    """FSDP frees the gathered parameters so, MemCNN and PyG what a block was given."""
    events: list[Event] = []
    with MemoryTracker(events=events) as memory:
        x, y = torch.empty(100), torch.empty(10)
        x.untyped_storage().resize_(0)
        assert memory.live == 40
        with memory.phase("second") as second, MemoryTracker() as inner:
            x.untyped_storage().resize_(800)
            torch.ones(2)
            x.untyped_storage().resize_(0)
            y.untyped_storage().resize_(0)
        assert (memory.live, second.peak, inner.live, inner.peak) == (0, 848, 0, 808)
    assert [e.change for e in events] == [400, 40, -400, 800, 8, -8, -800, -40]
    assert {e.operator for e in events if abs(e.change) > 40} == {"aten.empty.memory_format"}


def test_a_storage_that_does_not_count_may_have_any_size() -> None:
    weight = torch.empty(100)
    with MemoryTracker(ignore=[weight]) as memory:
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(4000)
    assert memory.live == memory.peak == 0


def test_without_a_tracker_storages_are_resized_by_torch_alone() -> None:
    assert "resize_" not in vars(torch.UntypedStorage)
    with suppress(KeyError), MemoryTracker(), MemoryTracker():
        assert "resize_" in vars(torch.UntypedStorage)
        raise KeyError
    assert "resize_" not in vars(torch.UntypedStorage)


def test_the_tracker_looks_into_sparse_and_wrapped_tensors() -> None:
    with MemoryTracker() as memory:
        sparse = torch.eye(8).to_sparse()
        assert memory.live == 8 * (2 * 8 + 4)  # two indices and a value for each entry
        del sparse
        jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
        before = memory.live
        doubled = jagged * 2
        assert memory.live - before == 6 * 3 * 4
        assert doubled.is_nested


def test_the_log_of_events_adds_up() -> None:
    events: list[Event] = []
    with MemoryTracker(events=events) as memory:
        x = torch.ones(10)
        with memory.phase("outer") as outer:
            y = x + 1
            with memory.phase("inner") as inner:
                z = torch.cat([x, y])
            del y
    assert [(e.change, e.live, e.phase) for e in events] == [
        (40, 40, ""),
        (40, 80, "outer"),
        (80, 160, "inner"),
        (-40, 120, "outer"),
    ]
    assert events[3].storage == events[1].storage
    assert (outer.peak, inner.peak, memory.peak, z.nbytes) == (160, 160, 160, 80)
    assert [h.operator for h in holdings(events)] == ["aten.cat.default", "aten.ones.default", "aten.add.Tensor"]
    assert sum(h.bytes for h in holdings(events, "end")) == memory.live
    assert holdings([]) == []


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.Tensor, torch.empty(0).new_tensor])
def test_tensors_made_of_numbers_count(make: Any) -> None:
    with MemoryTracker() as memory:
        made = make([1.0] * 1000)
        assert memory.live == made.nbytes == 4000
        del made
        assert memory.live == 0


def test_memory_shared_with_numpy_does_not_count() -> None:
    numpy = pytest.importorskip("numpy")
    with MemoryTracker() as memory:
        shared = torch.as_tensor(numpy.zeros(1000))
        assert memory.live == 0
        copied: Tensor = torch.tensor(numpy.zeros(1000))
    assert memory.live == copied.nbytes == shared.nbytes


def test_a_storage_that_was_empty_before_the_tracker_counts_when_it_grows() -> None:
    """FSDP2 keeps the storages of gathered parameters from step to step, and empties them in between."""
    tensor = torch.zeros(256)
    tensor.untyped_storage().resize_(0)
    with MemoryTracker() as memory:
        tensor.untyped_storage().resize_(1024)
        assert memory.live == 1024
        tensor.untyped_storage().resize_(0)
    assert (memory.live, memory.peak) == (0, 1024)
