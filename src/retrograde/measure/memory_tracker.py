"""Bytes of live tensor storage, exact, at any point of a run.

NOTE [What the tracker sees]
 1. A storage counts from the operator that returned it until it is freed; views of it count
    nothing. A storage that an operator first meets as an argument was there before the tracker
    (weights, inputs, data) and never counts, whatever view of it is made.
 2. Operators of the backward pass are seen if `backward` is called while the tracker is on, the
    replays of a tape and the nodes written in C++ among them. Other threads' operators are not.
 3. Memory that a kernel allocates and frees before it returns is not seen, nor that of generators,
    compiled code and plain numbers (8 bytes each). `torch.profiler` sees all of these.
 4. A storage that is resized is followed, even if no operator does it: FSDP and other libraries free tensors by
    `untyped_storage().resize_(0)`. One that was empty before the tracker began counts when it grows.
 5. Under any dispatch mode autograd adds two gradients of one tensor out of place, where it
    would otherwise add into the first: a peak at such a sum is too high by the size of that gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

# The one home of dispatch modes, for all its underscore; as read in torch 2.13.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from retrograde.engine.torch_internals import load_compiler


class Event(NamedTuple):
    """A change of the live bytes: allocated (positive) or freed (negative).

    `live` are the bytes after it, `storage` is a number that no other storage gets,
    `operator` made the storage, and `phase` is the innermost one at the time, or "".
    """

    change: int
    live: int
    storage: int
    operator: str
    phase: str


class Holding(NamedTuple):
    """A storage that is alive: its bytes, the operator that made it, and in which phase."""

    bytes: int
    operator: str
    phase: str


@dataclass
class Phase:
    """A part of a run with its own peak, which may be read during the part and afterwards."""

    label: str
    peak: int


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensor storage that are made while it is on. See NOTE [What the tracker sees].

    `live` are the bytes now, `peak` the most there were. What is freed later still leaves `live`.

    Args:
        ignore: tensors and modules (parameters, their gradients, buffers) not to count.
        events: a list that receives an `Event` for each change, in the order of time.
        kind: the one kind of device to count on, such as "cuda"; all of them by default.

    Examples:
        >>> import torch
        >>> from retrograde.measure import MemoryTracker
        >>> model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        >>> with MemoryTracker(ignore=[model, x]) as memory:
        ...     y = model(x).tanh()
        ...     saved = memory.live
        ...     with memory.phase("backward") as backward:
        ...         y.sum().backward()
        >>> saved, backward.peak > saved
        (128, True)
    """

    def __init__(
        self,
        ignore: Iterable[Tensor | nn.Module] = (),
        *,
        events: list[Event] | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        load_compiler()
        self.live = self.peak = 0
        self.events = events
        self._kind = kind
        self._phases: list[Phase] = []
        self._watched: dict[int, _Watched] = {}
        self._numbers = 0
        self.ignore(*ignore)

    def ignore(self, *things: Tensor | nn.Module) -> None:
        """Stop counting the storages of some tensors and modules; what counted of them is subtracted."""
        for thing in things:
            for storage in _storages(_belongings(thing) if isinstance(thing, nn.Module) else thing):
                watched = self._watched.get(id(storage)) or self._watch(storage, "")
                self._change(watched, -watched.bytes)
                watched.counts = False

    def counts(self, *tensors: Tensor) -> int:
        """How many of the live bytes belong to these tensors."""
        storages = {id(s): s for tensor in tensors for s in _storages(tensor)}
        watched = [self._watched.get(key) for key in storages]
        return sum(w.bytes for w in watched if w is not None and w.counts)

    @contextmanager
    def phase(self, label: str) -> Iterator[Phase]:
        """Measure the peak of what runs inside, and label its events. Phases may be nested."""
        self._phases.append(Phase(label, self.live))
        try:
            yield self._phases[-1]
        finally:
            self._phases.pop()

    def __enter__(self) -> MemoryTracker:
        with _LOCK:
            _ACTIVE.append(self)
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with _LOCK:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                del torch.UntypedStorage.resize_  # that of its base class reappears

    def numbers(self, *tensors: Tensor) -> set[int]:
        """The numbers of these tensors' storages, by which events name them."""
        watched = [self._watched.get(id(s)) for tensor in tensors for s in _storages(tensor)]
        return {w.number for w in watched if w is not None}

    def resized(self, storage: torch.UntypedStorage, *, was_empty: bool = False) -> None:
        """Note a storage's new size. One that was empty until now is new, whoever had it before."""
        watched = self._watched.get(id(storage))
        if watched is None and was_empty:
            watched = self._watch(storage, "resize_")
        if watched is not None and watched.counts:
            self._change(watched, storage.nbytes() - watched.bytes)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            # What `torch.tensor` makes of numbers is first seen by `lift_fresh`; what it shares with numpy was there.
            fresh = func is torch.ops.aten.lift_fresh.default and storage.resizable()
            if id(storage) not in self._watched and not fresh:
                self._watch(storage, "").counts = False
        result = func(*args, **(kwargs or {}))
        for storage in _storages((result, args)):  # the arguments too: they may have been resized
            if id(storage) not in self._watched:
                self._watch(storage, str(func))
            self.resized(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage, operator: str) -> _Watched:
        self._numbers += 1
        watched = _Watched(storage, self._forget)
        watched.key, watched.number, watched.operator = id(storage), self._numbers, operator
        watched.counts = self._kind is None or storage.device.type in (self._kind, "meta")  # "meta": of fake tensors
        self._watched[watched.key] = watched
        return watched

    def _forget(self, watched: Any) -> None:
        del self._watched[watched.key]
        self._change(watched, -watched.bytes)

    def _change(self, watched: _Watched, change: int) -> None:
        if not change:
            return
        watched.bytes += change
        self.live += change
        self.peak = max(self.peak, self.live)
        for phase in self._phases:
            phase.peak = max(phase.peak, self.live)
        if self.events is not None:
            label = self._phases[-1].label if self._phases else ""
            self.events.append(Event(change, self.live, watched.number, watched.operator, label))


_ACTIVE: list[MemoryTracker] = []
_LOCK = threading.Lock()
_RESIZE = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    """In the place of a storage's own `resize_`, which no operator shows: tells the active trackers."""
    was_empty = storage.nbytes() == 0
    result = _RESIZE(storage, size)
    for tracker in _ACTIVE.copy():
        tracker.resized(storage, was_empty=was_empty)
    return result


class _Watched(weakref.ref[torch.UntypedStorage]):
    """What a tracker notes of a storage, without keeping it alive. torch has one Python object for each storage."""

    key = number = bytes = 0
    operator = ""
    counts = True


def holdings(events: Sequence[Event], at: Literal["peak", "end"] = "peak") -> list[Holding]:
    """What was alive when the most bytes were, or at the end; the largest first."""
    until = len(events) if at == "end" else 1 + max(range(len(events)), key=lambda i: events[i].live, default=-1)
    alive: dict[int, Holding] = {}
    for change, _, storage, operator, phase in events[:until]:
        before = alive.pop(storage, Holding(0, operator, phase))
        if before.bytes + change:
            alive[storage] = before._replace(bytes=before.bytes + change)
    return sorted(alive.values(), key=lambda holding: -holding.bytes)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of some tensors' storages, each counted once; of a sharded tensor, those of this rank."""
    return sum({id(storage): storage.nbytes() for storage in _storages(list(tensors))}.values())


def _belongings(module: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [*module.parameters(), *gradients, *module.buffers()]


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in nested containers; of a wrapper or a sparse tensor, those of its parts."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            yield from _storages([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif value.layout == torch.strided:
            yield value.untyped_storage()
        else:
            yield from _storages([getattr(value, part)() for part in _PARTS.get(value.layout, ())])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
