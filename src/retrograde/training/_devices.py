"""The device of a process and the backend that moves its tensors to other processes, chosen in this one place."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ._config import ConfigError


def device_named(name: str) -> torch.device:
    """The device of this process: "auto" is the machine's accelerator, if it has one. Raises if it cannot be used."""
    try:
        device = torch.device(name) if name != "auto" else torch.accelerator.current_accelerator(check_available=True)
        device = device or torch.device("cpu")
        if device.type not in ("cpu", "meta") and device.index is None:
            device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.empty(1, device=device).add_(1).item()
    except Exception as error:  # its type differs by device
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f'training.device = "{name}" cannot be used here: {reason}') from None
    return device


def backend_for(device: torch.device) -> str:
    """The backend for `torch.distributed.init_process_group`: NCCL for CUDA, XCCL for XPU, gloo for the CPU.

    On an accelerator gloo is there too, for tensors on the CPU: those that are offloaded, and distributed checkpoints.

    Examples:
        >>> from retrograde.training import backend_for
        >>> backend_for(torch.device("cpu")), backend_for(torch.device("cuda", 1))
        ('gloo', 'cpu:gloo,cuda:nccl')
    """
    try:
        backend = dist.get_default_backend_for_device(device.type)
    except ValueError:
        raise ConfigError(
            f"torch knows no backend that moves tensors of {device.type} devices between processes. Register one with "
            "torch.distributed.Backend.register_backend, train in one process, or on another device."
        ) from None
    return backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"
