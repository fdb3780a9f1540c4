"""Bytes of live tensor storage, exact, at any point of a run.

NOTE [What the tracker sees]
 1. A storage counts from the operator that returned it until it is freed; views of it count
    nothing. A storage that an operator first meets as an argument was there before the tracker
    (weights, inputs, data) and never counts, whatever view of it is made.
 2. Operators of the backward pass are seen if `backward` is called while the tracker is on, the
    replays of a tape and the nodes written in C++ among them. Other threads' operators are not.
 3. Memory that a kernel takes and gives back before it returns is not seen, nor what generators,
    compiled code and plain numbers (8 bytes each) take. `torch.profiler` sees all of these.
 4. A storage that is given another size is followed, also where no operator does it: FSDP and other libraries free
    tensors by `untyped_storage().resize_(0)`.
 5. Under any dispatch mode autograd adds two gradients of one tensor out of place, where it
    would else add into the first: a peak at such a sum is over by the size of that gradient.
"""

from __future__ import annotations

import functools
import gc
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


class Event(NamedTuple):
    """A change of the live bytes: taken (positive) or given back (negative).

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
    """A stretch of a run with its own peak. It may be read while it lasts and afterwards."""

    label: str
    peak: int


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensor storage that are made while it is on. See NOTE [What the tracker sees].

    `live` are the bytes now, `peak` the most there were. What is freed later still leaves `live`.

    Args:
        ignore: tensors and modules (parameters, their gradients, buffers) not to count.
        events: a list that receives an `Event` for each change, in the order of time.

    Examples:
        >>> import torch
        >>> from retrograde.diagnose import MemoryTracker
        >>> model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        >>> with MemoryTracker(ignore=[model, x]) as memory:
        ...     y = model(x).tanh()
        ...     held = memory.live
        ...     with memory.phase("backward") as backward:
        ...         y.sum().backward()
        >>> held, backward.peak > held
        (128, True)
    """

    def __init__(self, ignore: Iterable[Tensor | nn.Module] = (), *, events: list[Event] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _load_compiler()
        self.live = self.peak = 0
        self.events = events
        self._phases: list[Phase] = []
        self._watched: dict[int, _Watched] = {}
        self._numbers = 0
        self.ignore(*ignore)

    def ignore(self, *things: Tensor | nn.Module) -> None:
        """Leave out the storages of tensors and modules from now on; what counted of them is taken off."""
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
        _RESIZES.tell(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _RESIZES.leave_out(self)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take notice of a storage's new size."""
        watched = self._watched.get(id(storage))
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
        for storage in _storages((result, args)):  # the arguments again: they may have been resized
            if id(storage) not in self._watched:
                self._watch(storage, str(func))
            self.resized(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage, operator: str) -> _Watched:
        self._numbers += 1
        watched = _Watched(storage, self._forget)
        watched.key, watched.number, watched.operator = id(storage), self._numbers, operator
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


class _Resizes:
    """Tells trackers that are on of storages that are given another size, which is no operator."""

    def __init__(self) -> None:
        self._trackers: list[MemoryTracker] = []
        self._lock = threading.Lock()

    def tell(self, tracker: MemoryTracker) -> None:
        with self._lock:
            self._trackers.append(tracker)
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]

    def leave_out(self, tracker: MemoryTracker) -> None:
        with self._lock:
            self._trackers.remove(tracker)
            if not self._trackers:
                del torch.UntypedStorage.resize_  # the one of its base class is there again

    def happened(self, storage: torch.UntypedStorage) -> None:
        for tracker in list(self._trackers):
            tracker.resized(storage)


_RESIZES = _Resizes()
_RESIZE = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _RESIZE(storage, size)
    _RESIZES.happened(storage)
    return result


class _Watched(weakref.ref[torch.UntypedStorage]):
    """What is known of a storage, without holding it. torch keeps one Python object for each storage."""

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
    return sorted(alive.values(), reverse=True)


@functools.cache
def _load_compiler() -> None:
    """Else the first operator under a dispatch mode does so, and the import leaves its callers' frames in a cycle."""
    torch.compiler.disable(_load_compiler)
    gc.collect()


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
