"""Streams that a tape keeps until the backward pass: as autograd keeps any tensor, or in the host's memory."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograde.network.streams import Streams, versions

from .torch_internals import saved_tensor_hooks_active


class KeepsStreams(Protocol):
    """Keeps streams until they are asked for."""

    def tensors(self) -> Streams: ...


class _Save(torch.autograd.Function):
    """A node that only saves tensors. It belongs to no graph, so that it cannot be part of a cycle."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, tensors: Streams) -> Tensor:
        ctx.save_for_backward(*tensors)
        return dummy.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("a node that only saves tensors was walked")


_DUMMY = torch.empty(0, requires_grad=True)


class SavedStreams:
    """Tensors saved as autograd saves its own: edits in place are detected, outer hooks apply.

    They must be detached from any graph: aliases with the same storage and version counter. Where hooks are around
    the call a node saves them, and its output is held too: in torch 2.6 a node frees what it saved when its output
    goes. Inside of a tape the hooks are the tape's own, which are for activations alone.
    """

    __slots__ = ("_output", "_unpacked", "_versions")

    def __init__(self, tensors: Streams, *, is_inside_tape: bool = False) -> None:
        if is_inside_tape or not saved_tensor_hooks_active():
            self._unpacked: Streams | None = tensors
            self._versions = versions(tensors)
            return
        with torch.enable_grad():
            self._output: Any = _Save.apply(_DUMMY, tensors)  # type: ignore[no-untyped-call]
        self._unpacked = None

    def tensors(self) -> Streams:
        """The tensors. They are unpacked once: torch.utils.checkpoint, if it is around us, allows no second time."""
        if self._unpacked is None:
            self._unpacked = self._output.grad_fn.saved_tensors
            self._versions = versions(self._unpacked)
        elif versions(self._unpacked) != self._versions:
            raise edited_in_place("a stream or a tensor of the context")
        return self._unpacked


class OffloadedStreams:
    """Streams in the host's memory. The host waits for neither copy, where its memory can be pinned for the device.

    The way back reads what the way there writes, so the device has to do them in this order, on whatever stream
    the backward pass runs. Tensors of the CPU are on the host already, and those of the meta device nowhere: they are
    saved without a copy.
    """

    def __init__(self, tensors: Streams) -> None:
        self._devices = [t.device for t in tensors]
        self._saved: SavedStreams | None = None
        self._copies: list[Tensor] = []
        self._events: dict[torch.device, Any] = {}
        if all(d.type in ("cpu", "meta") for d in self._devices):
            self._saved = SavedStreams(tensors)
            return
        self._copies.extend(map(self._to_host, tensors))
        for device in self._events:
            with torch.accelerator.device_index(device.index):
                self._events[device] = torch.get_device_module(device).Event()
                self._events[device].record()

    def _to_host(self, tensor: Tensor) -> Tensor:
        device = tensor.device
        if device.type == "cpu":
            return tensor.clone()
        can_pin = _can_pin(device.type)
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=can_pin)
        has_events = hasattr(torch.get_device_module(device), "Event")  # that keep the order of the copies
        copy.copy_(tensor, non_blocking=can_pin and has_events)
        if can_pin and has_events:
            self._events[device] = None
        return copy

    def tensors(self) -> Streams:
        """The tensors, back on their devices."""
        if self._saved is not None:
            return self._saved.tensors()
        for device, event in self._events.items():
            with torch.accelerator.device_index(device.index):
                event.wait()  # the device's current stream waits, not the host
        return tuple(
            copy if device.type == "cpu" else copy.to(device, non_blocking=True)
            for copy, device in zip(self._copies, self._devices, strict=True)
        )


@functools.cache
def _can_pin(kind: str) -> bool:
    """Whether the host's memory can be pinned for this kind of device, without which the host waits for its copies.

    torch pins for its one accelerator, if that has an allocator for it. MPS shares the host's memory.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or kind == "mps":
        return False
    try:
        torch.empty_strided((1,), (1,), device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True


def edited_in_place(what: str) -> RuntimeError:
    """The error that autograd raises for the same mistake, with the tensor's role in it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was edited between the forward pass and its backward pass, which runs the branch again. "
        "Edit it after the backward pass, or edit a copy. (A FusedOptimizer edits a weight once its gradient is "
        "complete: give a weight that an earlier block uses without a gradient to an ordinary optimiser.)"
    )
