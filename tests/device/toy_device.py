"""An accelerator made in Python: a device type "toy", for what a real accelerator would show about the library.

NOTE [The toy device]
 1. Its tensors are ordinary ones: plain `torch.Tensor`s without data for the host, whose storages each hold host memory
    in `storage.memory`. Every operator without a composite kernel runs on that memory, in `_run`.
 2. `DEVICE` counts bytes (allocated, peak), allocations, copies in both directions, and waits of the host: for
    numbers it reads, shapes that depend on data, copies that block, and events.
 3. A copy to pinned host memory with `non_blocking=True` stays in the queue of `DEVICE.stream` until the host or
    another stream waits for it, or the same stream copies something back: who reads too early finds NaN.
 4. Its generator is its own. Kernels run at once, so that overlap and speed are not to be seen here.
 5. Backward passes run in a thread of autograd's for the device, as on other accelerators. A Python error in that
    thread ends the process (torch 2.13, with any device made in Python): errors are tested on the CPU.
 Registering it is global to a process: `conftest.py` runs each file of this folder in a process of its own.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten


class Device:
    """The state of the one toy device. `counts` are read, and reset, by tests."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generator = torch.Generator()
        self.allocated = 0
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.stream = Stream()
        self.pending: list[tuple[Stream, Tensor, Tensor]] = []
        self.reset()

    def reset(self) -> None:
        """Set the counters to zero, and the settings to what they are by default."""
        self.peak = self.allocated
        self.counts = dict.fromkeys(("allocations", "to_device", "to_host", "waits", "rng_reads"), 0)
        self.log: list[str] = []
        self.limit, self.can_pin = 1 << 40, True

    def count(self, what: str, note: str = "") -> None:
        with self.lock:
            self.counts[what] += 1
            if note:
                self.log.append(note)

    def allocate(self, storage: torch.UntypedStorage, memory: torch.UntypedStorage) -> None:
        """Give a storage its memory, and count the bytes until the storage is freed."""
        size = memory.nbytes()
        with self.lock:
            if self.allocated + size > self.limit:
                raise torch.OutOfMemoryError(
                    f"toy device out of memory: {self.allocated} + {size} > {self.limit} bytes"
                )
            storage.memory = memory  # type: ignore[attr-defined]
            self.counts["allocations"] += 1
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self.free, size).atexit = False

    def free(self, size: int) -> None:
        with self.lock:
            self.allocated -= size

    def finish(self, stream: Stream | None = None) -> None:
        """Do the copies to the host that are still to be done, on one stream or on all."""
        with self.lock:
            done = [each for each in self.pending if stream is None or each[0] is stream]
            self.pending = [each for each in self.pending if stream is not None and each[0] is not stream]
            for _, source, target in done:
                target.copy_(source)


class Stream:
    """A queue of the device. Work on it is in order; copies to pinned memory wait in it."""

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        DEVICE.log.append("wait_stream")
        DEVICE.finish(stream)

    def synchronize(self) -> None:
        DEVICE.count("waits", "stream.synchronize")
        DEVICE.finish(self)


class Event:
    """A mark in a stream."""

    def __init__(self, **_: Any) -> None:
        self.recorded: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = stream or DEVICE.stream
        DEVICE.log.append("event.record")

    def wait(self, stream: Stream | None = None) -> None:
        """A stream of the device waits, not the host."""
        DEVICE.log.append("event.wait")
        DEVICE.finish(self.recorded)

    def query(self) -> bool:
        return all(stream is not self.recorded for stream, _, _ in DEVICE.pending)

    def synchronize(self) -> None:
        DEVICE.count("waits", "event.synchronize")
        DEVICE.finish(self.recorded)


class Module(backend_registration._DummyBackendModule):
    """What `torch.get_device_module("toy")` returns, with the names that torch.cuda has."""

    Stream, Event = Stream, Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        DEVICE.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        DEVICE.count("rng_reads")
        return DEVICE.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        DEVICE.generator.set_state(state)

    def synchronize(self) -> None:  # without a device, as that of MPS
        DEVICE.count("waits", "synchronize")
        DEVICE.finish()

    def current_stream(self, device: Any = None) -> Stream:
        return DEVICE.stream

    def memory_allocated(self, device: Any = None) -> int:
        return DEVICE.allocated

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return DEVICE.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        DEVICE.peak = DEVICE.allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return DEVICE.limit - DEVICE.allocated, DEVICE.limit


DEVICE = Device()


@contextlib.contextmanager
def _as_meta() -> Iterator[None]:
    """Inside, kernels of the meta device run, which set sizes and strides and touch no memory."""
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)


def _on_toy(host: Tensor, storage: torch.UntypedStorage | None = None) -> Tensor:
    """A toy tensor with the memory and the geometry of a host tensor; on a toy storage, if it is a view of one."""
    result = torch._C._acc.create_empty_tensor([0], host.dtype)
    known = storage is not None
    storage = storage if storage is not None else result.untyped_storage()
    with _as_meta():
        aten.set_.source_Storage_storage_offset(result, storage, host.storage_offset(), host.size(), host.stride())
    if not known:
        DEVICE.allocate(result.untyped_storage(), host.untyped_storage())
    return result


def on_host(tensor: Tensor) -> Tensor:
    """A toy tensor's memory, as a host tensor."""
    memory = getattr(tensor.untyped_storage(), "memory", None)
    if memory is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_toy(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "toy"


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the memory of its arguments."""
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags):
        DEVICE.count("waits", str(op))
    toys = {id(t): t for t in tree_leaves((args, kwargs)) if _is_toy(t)}
    hosts = {key: on_host(t) for key, t in toys.items()}
    numbers = [_number_as_tensor(a, given) for a, given in zip(op._schema.arguments, args, strict=False)]
    host_args, host_kwargs = tree_map(lambda a: _argument(a, hosts), (numbers, dict(kwargs)))
    with _drawing() if torch.Tag.nondeterministic_seeded in op.tags else contextlib.nullcontext():
        results = op(*host_args, **host_kwargs)
    own = {id(host): toys[key] for key, host in hosts.items()}
    storages = {host.untyped_storage()._cdata: toys[key].untyped_storage() for key, host in hosts.items()}

    def returned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in own:
            return _same_geometry(own[id(value)], value)
        return _on_toy(value, storages.get(value.untyped_storage()._cdata))

    return tree_map(returned, results)


def _number_as_tensor(argument: Any, given: Any) -> Any:
    """The dispatcher hands a Python kernel a number where an operator has a tensor that was made of one."""
    is_number = isinstance(given, (bool, int, float)) and str(argument.type) == "Tensor"
    return torch.tensor(given) if is_number else given


def _argument(value: Any, hosts: dict[int, Tensor]) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "toy" else value
    return hosts.get(id(value), value) if isinstance(value, Tensor) else value


def _same_geometry(toy: Tensor, host: Tensor) -> Tensor:
    """A tensor that an operator wrote to, which may have been resized."""
    if toy.size() != host.size() or toy.stride() != host.stride():
        with _as_meta():
            aten.set_.source_Storage_storage_offset(
                toy, toy.untyped_storage(), host.storage_offset(), host.size(), host.stride()
            )
        if not hasattr(toy.untyped_storage(), "memory"):
            DEVICE.allocate(toy.untyped_storage(), host.untyped_storage())
    return toy


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Inside, the host's generator is in the state of the device's: kernels take no generator of another kind."""
    with DEVICE.lock:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(DEVICE.generator.get_state())
        try:
            yield
        finally:
            DEVICE.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)


def _empty(size: Sequence[int], **options: Any) -> Tensor:
    options.pop("pin_memory", None)
    return _on_toy(torch.empty(size, **{**options, "device": "cpu"}))


def _empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    return _on_toy(torch.empty_strided(size, stride, dtype=options.get("dtype")))


def _set(tensor: Tensor, *source: Any) -> Tensor:
    with _as_meta():
        return tensor.set_(*source)


def _scalar(tensor: Tensor) -> Any:
    DEVICE.count("waits", "item")
    return on_host(tensor).item()


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, to it, or to the host."""
    if _is_toy(target):
        if not _is_toy(source):
            DEVICE.count("to_device", "to_device")
            DEVICE.finish(DEVICE.stream)  # what was queued before on the same stream is done before
        on_host(target).copy_(on_host(source) if _is_toy(source) else source)
        return target
    if non_blocking and target.untyped_storage() in DEVICE.pinned:
        DEVICE.count("to_host", "to_host")
        target.fill_(float("nan") if target.is_floating_point() else 0)
        DEVICE.pending.append((DEVICE.stream, on_host(source).clone(), target))
        return target
    DEVICE.count("to_host", "to_host, blocking")
    DEVICE.count("waits")
    target.copy_(on_host(source))
    return target


def _convolution(*args: Any) -> Tensor:
    result: Tensor = _run(aten.convolution.default, *args)
    return result


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    channels = weight.size(1) * options[-2] if options[3] else weight.size(0)
    *settings, _ = options
    results: tuple[Tensor, Tensor, Tensor] = _run(
        aten.convolution_backward.default, grad, x, weight, [channels], *settings, [True, True, True]
    )
    return results


def _pinning(size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    """`empty_strided` of the host, which torch cannot pin for a device made in Python."""
    length = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    result = torch.empty(length, dtype=options.get("dtype")).as_strided(size, stride)
    if options.get("pin_memory"):
        if not DEVICE.can_pin:
            raise NotImplementedError("the toy device pins no memory")
        DEVICE.pinned.add(result.untyped_storage())
    return result


LOWER = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "conv2d", "scaled_dot_product_attention")
HIGHER = ("layer_norm", "softmax.int", "log_softmax.int", "nll_loss", "mse_loss", "sum", "exp", "pow.Tensor_Scalar")


def _autocast(op: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype()

        def cast(value: Any) -> Any:
            is_cast = _is_toy(value) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(wanted) if is_cast else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _data_ptr(storage: torch.UntypedStorage) -> int:
    """An address, which `torch.save` asks for to tell storages apart."""
    memory = getattr(storage, "memory", None)
    return torch._C.StorageBase.data_ptr(storage if memory is None else memory)


def _storage_on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage's copy on the host, for `torch.save`."""
    memory = getattr(storage, "memory", None)
    if memory is None:
        return _STORAGE_TO_HOST(storage)
    DEVICE.count("to_host", "to_host, blocking")
    DEVICE.count("waits")
    return memory.clone()


_STORAGE_TO_HOST = torch.UntypedStorage.cpu
_LIBRARIES: list[torch.library.Library] = []


def register() -> None:
    """Make "toy" the accelerator of this process."""
    backend_registration._setup_privateuseone_for_python_backend(rename="toy", backend_module=Module())
    torch.UntypedStorage.data_ptr = _data_ptr  # type: ignore[method-assign]
    torch.UntypedStorage.cpu = _storage_on_host  # type: ignore[method-assign]
    torch.accelerator.synchronize = lambda device=None: torch.get_device_module("toy").synchronize()  # has no kernel
    everything, ours = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((everything, ours))
    everything.fallback(_run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_local_scalar_dense": _scalar,
        "_copy_from": _copy,
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
        "set_": _set,
        "set_.source_Tensor": _set,
        "set_.source_Storage": _set,
        "set_.source_Storage_storage_offset": _set,
    }
    for name, kernel in kernels.items():
        ours.impl(name, kernel, "PrivateUse1")
    for names, dtype in ((LOWER, lambda: torch.get_autocast_dtype("toy")), (HIGHER, lambda: torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            ours.impl(name, _autocast(op, dtype), "AutocastPrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is meant to take the place of torch's own
        ours.impl("empty_strided", _pinning, "CPU", allow_override=True)
