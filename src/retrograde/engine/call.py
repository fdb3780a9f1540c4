"""What the tapes of one call share: the streams' names, the context, and the settings and generators around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from retrograde.network.step import StreamName
from retrograde.network.streams import Streams

from . import rng
from .decisions import Decisions, open_decisions
from .exactness import Ranges
from .observer import Observer
from .saved_streams import SavedStreams
from .torch_internals import (
    float32_precision,
    inside_function_transform,
    tree_flatten,
    tree_unflatten,
)


class CallEnvironment:
    """What surrounds a whole call: autocast, and the generators that any branch may draw from.

    `states` are those of torch's generators when they were last read; the first is that of the CPU's.
    """

    __slots__ = ("_autocast", "_cache", "_global_seen", "_precision", "drew_globally", "generators",
                 "global_generators", "states")  # fmt: skip

    def __init__(self, devices: Sequence[torch.device], context: Iterable[Any]) -> None:
        kinds = dict.fromkeys(["cpu", *(d.type for d in devices if d.type != "meta")])
        self._autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self._cache = torch.is_autocast_cache_enabled()
        self._precision = torch.get_float32_matmul_precision()
        self.generators = rng.torch_generators(devices) + rng.generators_in(context)
        self.states = self.read()
        self.global_generators = rng.global_generators()
        self._global_seen = [rng.fingerprint(g) for g in self.global_generators]
        self.drew_globally = False

    def read(self) -> list[Any]:
        """The RNG states of torch's generators."""
        return [rng.read(g) for g in self.generators]

    def check_global_rng(self) -> None:
        """Note in `drew_globally` if Python's or NumPy's generator moved since it was last looked at."""
        now = [rng.fingerprint(g) for g in self.global_generators]
        self.drew_globally = self.drew_globally or now != self._global_seen
        self._global_seen = now

    def mark_global_rng(self) -> None:
        """Whatever Python's or NumPy's generator did up to now is recorded, or needs no record."""
        self._global_seen = [rng.fingerprint(g) for g in self.global_generators]

    def is_current(self) -> bool:
        """Whether autocast and the precision of products are those of the call, and no function transform is active."""
        if float32_precision() != self._precision or inside_function_transform():
            return False
        for kind, enabled, dtype in self._autocast:
            if torch.is_autocast_enabled(kind) != enabled:
                return False
            if enabled and (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) != (dtype, self._cache):
                return False
        return True

    def restored(self) -> ExitStack:
        """A context with autocast and the precision of products as they were when the call began."""
        stack = ExitStack()
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(self._precision)
        for kind, enabled, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
        return stack


class Call:
    """One call of a stack, as its tapes see it.

    `backward_pass` is what replays share in one backward pass, which is named by a number of autograd's: whether the
    settings are those of the call, and the context.
    """

    __slots__ = ("_leaves", "_saved", "_spec", "_tensors", "backward_pass", "environment", "names", "observer",
                 "open_decisions", "ranges")  # fmt: skip

    def __init__(
        self,
        names: tuple[StreamName, ...],
        streams: Streams,
        context: Mapping[str, Any],
        observer: Observer | None = None,
        ranges: Ranges | None = None,
    ) -> None:
        self.names = names
        self.ranges: Ranges = [] if ranges is None else ranges
        self.observer = observer
        self.open_decisions: list[Decisions] = open_decisions()
        self.backward_pass: tuple[int, bool, Mapping[str, Any]] = (-1, False, {})
        self._spec: Any = None
        leaves: list[Any] = []
        if context:
            leaves, self._spec = tree_flatten(dict(context))
        tensors = {i: value for i, value in enumerate(leaves) if isinstance(value, Tensor)}
        distinct = tuple({id(t): t for t in tensors.values()}.values())  # one with two names is one in a replay too
        numbers = {id(t): number for number, t in enumerate(distinct)}
        self._tensors = [(i, numbers[id(t)]) for i, t in tensors.items()]
        self._leaves = [None if isinstance(value, Tensor) else value for value in leaves]
        self._saved = SavedStreams(tuple(leaf(t, t.requires_grad) for t in distinct)) if distinct else None
        devices = dict.fromkeys(t.device for t in (*streams, *distinct))
        self.environment = CallEnvironment(list(devices), self._leaves)

    def begin_pass(self, number: int) -> tuple[int, bool, Mapping[str, Any]]:
        """Prepare for the replays of a backward pass: compare the settings around it, and rebuild the context."""
        self.backward_pass = number, self.environment.is_current(), self._rebuilt_context()
        return self.backward_pass

    def _rebuilt_context(self) -> Mapping[str, Any]:
        """The context as the first run had it, without its producer's graph."""
        if self._spec is None:
            return {}
        leaves = list(self._leaves)
        if self._saved is not None:
            tensors = self._saved.tensors()
            for i, number in self._tensors:
                leaves[i] = tensors[number]
        context: Mapping[str, Any] = tree_unflatten(leaves, self._spec)
        return context


def leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same storage and version counter, as the start of a new graph."""
    detached = tensor.detach()
    return detached.requires_grad_() if requires_grad else detached
