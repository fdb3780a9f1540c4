"""How many bytes there still are. What needs more is predicted and not run: a process out of memory is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from . import device_memory

_SAFE = 0.8  # of what is free: allocators round sizes up, and leave holes
_LIMITS = (  # of the container, with what it uses: the two generations of Linux's control groups
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def has_room(model: nn.Module, needed: int) -> bool:
    """Whether a step that needs so many bytes can be tried where the model is."""
    devices = {p.device for p in model.parameters()} or {torch.device("cpu")}
    return all(needed <= _SAFE * free_bytes(device) for device in devices)


def free_bytes(device: torch.device, system: Path = Path("/")) -> int:
    """The bytes that a process can still take; where nobody tells, as many as there can be."""
    if device.type == "cpu":
        return min(_available(system / "proc/meminfo"), _left_to_container(system / "sys/fs/cgroup"))
    if torch.accelerator.current_accelerator() != torch.device(device.type):
        return sys.maxsize
    free = device_memory.free(device)
    unused = device_memory.reserved(device) - device_memory.allocated(device)
    return sys.maxsize if free is None else free + unused


def _available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux
        return sys.maxsize
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), sys.maxsize)


def _left_to_container(groups: Path) -> int:
    left = sys.maxsize
    for limit, used in _LIMITS:
        try:
            left = min(left, int((groups / limit).read_text()) - int((groups / used).read_text()))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return left
