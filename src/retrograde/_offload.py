"""Streams that wait in the host's memory while the accelerator works."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._record import Kept
from ._streams import Streams


class Offloaded:
    """Tensors kept in the host's memory, copied there and back beside the computation where the device allows it.

    Tensors of the CPU are there already, and those of the meta device nowhere: they are kept as they are.
    """

    def __init__(self, tensors: Streams) -> None:
        self._devices = [t.device for t in tensors]
        self._here: Kept | None = None
        self._copies: list[Tensor] = []
        self._done: list[Any] = []
        if all(d.type in ("cpu", "meta") for d in self._devices):
            self._here = Kept(tensors)
            return
        for tensor in tensors:
            self._copies.append(self._to_host(tensor))

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor.clone()
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=_can_pin(tensor.device)
        )
        module = torch.get_device_module(tensor.device)
        tells = hasattr(module, "Event")  # when the copy is done; else it has to be done now
        copy.copy_(tensor, non_blocking=tells)
        if tells:
            event = module.Event()
            event.record()
            self._done.append(event)
        return copy

    def tensors(self) -> Streams:
        """The tensors, back on their devices."""
        if self._here is not None:
            return self._here.tensors()
        for event in self._done:
            event.synchronize()
        self._done = []
        return tuple(
            copy if device.type == "cpu" else copy.to(device, non_blocking=True)
            for copy, device in zip(self._copies, self._devices, strict=True)
        )


def _can_pin(device: torch.device) -> bool:
    """Whether the host's memory can be pinned for this device, which copies beside the computation need.

    torch pins for its one accelerator. MPS shares the host's memory and has nothing to pin.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type != "mps"
