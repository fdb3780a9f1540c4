"""What the operators of a step cost on a device that is not here: a roofline, and what moves between ranks.

NOTE [The time of an operator]
 An operator takes as long as its arithmetic or its memory traffic does, whichever is longer: FLOPs (torch's own
 formulas, `torch.utils.flop_counter`) over the rate of its dtype, bytes read and written over the bandwidth. It takes
 at least the device's `overhead`: on an accelerator in the place of a shorter time, since the host runs ahead; on a CPU
 in addition. Causal attention counts half. Views cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# The one home of dispatch modes, for all its underscore; as read in torch 2.13.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from retrograde.engine.fake_internals import process_group_named

from .devices import Device

_ATEN = torch.ops.aten
_FREE = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.lift_fresh,
    _ATEN._local_scalar_dense, _ATEN._unsafe_view,
}  # fmt: skip


class Seconds(NamedTuple):
    """A predicted time: at best, likely, at worst."""

    best: float
    likely: float
    worst: float

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        return f"{format_seconds(self.likely)} ({format_seconds(self.best)} to {format_seconds(self.worst)})"


def format_seconds(seconds: float) -> str:
    """A time for people to read.

    >>> format_seconds(0.00123), format_seconds(0.45), format_seconds(12.3)
    ('1.23 ms', '450 ms', '12.3 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


NO_TIME = Seconds(0.0, 0.0, 0.0)


class Collective(NamedTuple):
    """One exchange between ranks: its kind, the bytes that a rank receives, and their time."""

    kind: str
    bytes: int
    seconds: Seconds


@dataclass
class OperatorCosts:
    """All operators of a run: their time on a device, their FLOPs, and what they exchanged."""

    seconds: Seconds = NO_TIME
    flops: int = 0
    collectives: list[Collective] = field(default_factory=list)
    unlisted: set[str] = field(default_factory=set)
    """Dtypes of matrix products whose rate the device does not list."""


class OperatorClock(TorchDispatchMode):
    """Adds up what the operators that run inside would cost on a device.

    Numbers that an optimiser reads of its state (the number of its step) are answered with 1: without values there is
    none to read.

    Args:
        on_sum: called before autograd adds up two gradients of one tensor, out of place under any dispatch mode.
    """

    def __init__(self, device: Device, *, on_sum: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = OperatorCosts()
        self._device = device
        self._on_sum = on_sum

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ATEN._local_scalar_dense.default and _inside_optimizer():
            return 1.0
        if func is _ATEN.add.Tensor and _called_by_autograd():
            self._on_sum()
        result = func(*args, **(kwargs or {}))
        if self._device.is_cpu and func in _WORKSPACES:
            torch.empty(_WORKSPACES[func](args), dtype=torch.uint8)  # alive for a moment, as the kernel's own
        kind = _kind_of_collective(func)
        if kind is not None:
            self.costs.collectives.append(_collective(kind, args, result, self._device))
        elif func.namespace not in ("c10d", "_c10d_functional") and func.overloadpacket not in _FREE:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        inputs, outputs = list(_tensors((args, tuple(kwargs.values())))), list(_tensors(result))
        before = {id(t.untyped_storage()) for t in inputs}
        edits = func.__name__.partition(".")[0].endswith("_") or "out" in kwargs
        if not edits and all(id(t.untyped_storage()) in before for t in outputs):
            return  # a view
        moved = _bytes({id(t): t for t in (*inputs, *outputs)}.values())
        flops = _flops(func, args, kwargs, result)
        dtype = _dtype(inputs)
        self.costs.flops += flops
        self.costs.seconds += _roofline(self._device, flops, moved, dtype)
        if flops and dtype not in (*self._device.flops, "tf32"):
            self.costs.unlisted.add(dtype)


def _roofline(device: Device, flops: int, moved: int, dtype: str) -> Seconds:
    rate, parts = device.rate(dtype), device.attained

    def at(name: str) -> float:
        compute, memory, host = (float(getattr(parts[key], name)) for key in ("flops", "bandwidth", "overhead"))
        longest = max(flops / (rate * compute), moved / (device.bandwidth * memory))
        overhead = device.overhead / host
        return longest + overhead if device.is_cpu else max(longest, overhead)

    return Seconds(*(at(name) for name in ("best", "likely", "worst")))


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    own = _OWN_FORMULAS.get(packet)
    if own is not None:
        return own(*args, **kwargs)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention_flops(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, **options: Any
) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape)) // (2 if is_causal else 1)


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dropout: float, is_causal: bool,
    **options: Any,
) -> int:  # fmt: skip
    count = int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))
    return count // (2 if is_causal else 1)


_OWN_FORMULAS: dict[Any, Callable[..., int]] = {  # of the CPU's attention, for which torch has none
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


_WORKSPACES: dict[Any, Callable[[Sequence[Any]], int]] = {
    # oneDNN reorders the output's gradient, the input and the weight, as the profiler shows. Other kernels' workspaces,
    # and those of accelerators, are not known here.
    _ATEN.convolution_backward.default: lambda args: _bytes(args[:3]),
    # gloo copies the input of a reduce-scatter and averages the copy, and gathers into a copy of the output.
    torch.ops.c10d._reduce_scatter_base_.default: lambda args: _bytes([args[1]]),
    torch.ops.c10d._allgather_base_.default: lambda args: _bytes([args[0]]),
}
"""What kernels and collectives of the CPU allocate for themselves, in bytes."""


def _called_by_autograd() -> bool:
    """Whether the engine itself runs an operator, and no Python code inside the backward pass."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("_fn", "inner", "wrapper"):  # torch's own, around dispatch
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _dtype(inputs: Sequence[Tensor]) -> str:
    """The name of the dtype in which an operator computes."""
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, which are nested in lists and tuples at most."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _inside_optimizer() -> bool:
    """Whether an optimiser's step asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


# What moves between ranks

_KINDS = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
_KINDS |= {"allreduce": "all-reduce", "all_reduce": "all-reduce", "broadcast": "broadcast"}
_KINDS |= {"alltoall": "all-to-all", "all_to_all": "all-to-all"}


def _kind_of_collective(func: Any) -> str | None:
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.__name__.lstrip("_")
    return next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), None)


def _collective(kind: str, args: Sequence[Any], result: Any, device: Device) -> Collective:
    """In a ring, a rank receives all parts but its own; all-reduce is a reduce-scatter and an all-gather."""
    ranks = _ranks(args)
    whole = max((_bytes([t]) for t in _tensors((args, result))), default=0)
    rounds = 2 if kind == "all-reduce" else 1
    received = rounds * whole * (len(ranks) - 1) // max(1, len(ranks))
    return Collective(kind, received, transfer_seconds(device, received, ranks))


def transfer_seconds(device: Device, size: int, ranks: Sequence[int]) -> Seconds:
    """The time in which a rank receives so many bytes from others of its group."""
    is_one_node = len({rank // device.per_node for rank in ranks}) <= 1
    peak, part = device.link if is_one_node else min(device.link, device.network), device.attained["link"]
    return Seconds(*(size / (peak * getattr(part, name)) for name in ("best", "likely", "worst")))


def _ranks(args: Sequence[Any]) -> list[int]:
    """The ranks of the group that an operator of torch.distributed was given, as an object or by its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
            except (RuntimeError, TypeError):  # another object: a reduction, for one
                continue
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product"):
            return dist.get_process_group_ranks(process_group_named(arg))
    return list(range(dist.get_world_size()))
