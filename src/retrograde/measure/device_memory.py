"""The bytes that an accelerator's allocator counts, whatever the kind of device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def accelerator_of(tensors: Iterable[Tensor]) -> str | None:
    """The kind of accelerator that tensors are on; None if they are on the host, or nowhere."""
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)


def allocated(device: torch.device) -> int:
    """The bytes of all tensors on a device now."""
    return _ask(device, "memory_allocated")


def reserved(device: torch.device) -> int:
    """The bytes that a device's allocator holds now: those of tensors, and free ones."""
    return _ask(device, "memory_reserved")


def peak(device: torch.device) -> int:
    """The most bytes of tensors that were on a device at a time."""
    return _ask(device, "max_memory_allocated")


def peak_reserved(device: torch.device) -> int:
    """The most bytes that a device's allocator held at a time."""
    return _ask(device, "max_memory_reserved")


def reset_peak(device: torch.device) -> None:
    """Forget the peak, where the device can."""
    _ask(device, "reset_peak_memory_stats")


def free(device: torch.device) -> int | None:
    """The bytes that nobody has taken on a device; None if it does not tell."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", torch.accelerator.get_memory_info)
    try:
        return int(ask(device)[0])
    except RuntimeError:
        return None


def _ask(device: torch.device, question: str) -> int:
    """The answer of the device's own module, or of `torch.accelerator`; 0 if neither can tell."""
    module = torch.get_device_module(device)
    ask = getattr(module if hasattr(module, question) else torch.accelerator, question)
    try:
        return int(ask(device) or 0)
    except RuntimeError:  # its allocator keeps no such count
        return 0
