"""The machine at hand as a device: its rates measured in a few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from retrograde.measure.free_memory import free_bytes
from retrograde.measure.timing import wait_for_devices

from .devices import THIS, Attained, Device

_SECONDS = 0.3  # for each rate
_MEASURED = {  # rates that were measured, on steps whose shapes differ from those that were timed
    "flops": Attained(0.7, 1.0, 1.15),
    "bandwidth": Attained(0.6, 1.0, 1.3),
    "link": Attained(0.5, 1.0, 1.2),
    "overhead": Attained(0.5, 1.0, 1.2),
}


def measured_machine() -> Device:
    """This machine: its accelerator if it has one, otherwise its CPU with the threads that torch uses."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    bandwidth = _bandwidth(device)
    return Device(
        THIS,
        memory=free_bytes(device),
        bandwidth=bandwidth,
        flops={str(dtype).removeprefix("torch."): _flops(device, dtype) for dtype in _dtypes(device)},
        link=bandwidth / 2 if device.type == "cpu" else 16e9,
        per_node=max(1, torch.accelerator.device_count() if accelerator else os.cpu_count() or 1),
        overhead=_overhead(device),
        attained=_MEASURED,
        is_cpu=device.type == "cpu",
        title=f"this machine ({device.type}, {torch.get_num_threads()} threads)",
        sources=("measured: matrix products of 1024 x 1024, sums of 64 MiB, sums of one number",),
    )


def _dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if device.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]


def _flops(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    a = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _least(lambda: a @ a, a)


def _bandwidth(device: torch.device, size: int = 2**24) -> float:
    a, b = torch.ones(size, device=device), torch.ones(size, device=device)
    return 3 * 4 * size / _least(lambda: torch.add(a, b, out=b), a)


def _overhead(device: torch.device) -> float:
    """Of one operator: dispatch, autograd, and the launch of a kernel, if there are kernels."""
    a = torch.ones((), device=device, requires_grad=True)
    many = 100
    return _least(lambda: [a + 1 for _ in range(many)], a) / many


def _least(run: Callable[[], object], sample: Tensor) -> float:
    """The least seconds of many runs: those that nothing else on the machine disturbed."""
    run()
    least, end = float("inf"), time.perf_counter() + _SECONDS
    while least == float("inf") or time.perf_counter() < end:  # once at least, however slow it is
        start = time.perf_counter()
        run()
        wait_for_devices([sample])
        least = min(least, time.perf_counter() - start)
    return least
