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
from .context import RecordedContext
from .decisions import Decisions, open_decisions
from .exactness import Ranges
from .observer import Observer
from .torch_internals import (
    cached_parametrizations,
    float32_precision,
    inside_function_transform,
    parametrizations_cached,
    set_float32_precision,
)


class CallEnvironment:
    """What surrounds a whole call: autocast, and the generators that any branch may draw from.

    `states` are those of torch's generators when they were last read; the first is that of the CPU's.
    """

    __slots__ = ("_autocast", "_cache", "_global_seen", "_precision", "caches_parametrizations", "drew_globally",
                 "generators", "global_generators", "states")  # fmt: skip

    def __init__(self, devices: Sequence[torch.device], context: Iterable[Any]) -> None:
        kinds = dict.fromkeys(["cpu", *(d.type for d in devices if d.type != "meta")])
        self._autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self._cache = torch.is_autocast_cache_enabled()
        self._precision = float32_precision()
        self.caches_parametrizations = cached_parametrizations() is not None
        self.generators = rng.torch_generators(devices) + rng.generators_in(context)
        self.states = self.read()
        self.global_generators = rng.global_generators()
        self._global_seen = [rng.fingerprint(g) for g in self.global_generators]
        self.drew_globally = False

    def read(self) -> list[Any]:
        """The RNG states of torch's generators."""
        return [rng.read(g) for g in self.generators]

    def drew(self) -> bool:
        """Whether a generator other than the CPU's, which the caller compares, moved since `states` were read."""
        return [rng.read(g) for g in self.generators[1:]] != self.states[1:]

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
        if (cached_parametrizations() is not None) != self.caches_parametrizations:
            return False
        for kind, enabled, dtype in self._autocast:
            if torch.is_autocast_enabled(kind) != enabled:
                return False
            if enabled and (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) != (dtype, self._cache):
                return False
        return True

    def restored(self) -> ExitStack:
        """A context with autocast and the precision of products as they were when the call began.

        What `parametrize.cached()` had computed differs from branch to branch: `BranchState` restores it.
        """
        stack = ExitStack()
        stack.callback(set_float32_precision, float32_precision())
        set_float32_precision(self._precision)
        if not self.caches_parametrizations:
            stack.enter_context(parametrizations_cached(None))
        for kind, enabled, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
        return stack


class Call:
    """One call of a stack, as its tapes see it.

    `backward_pass` is what replays share in one backward pass, which is named by a number of autograd's: whether the
    settings are those of the call, and the context.
    """

    __slots__ = ("_context", "backward_pass", "environment", "names", "observer", "open_decisions", "ranges")

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
        self._context = RecordedContext(context) if context else None
        devices = [s.device for s in streams]
        values: list[Any] = []
        if self._context is not None:
            devices, values = devices + self._context.devices, self._context.leaves
        self.environment = CallEnvironment(list(dict.fromkeys(devices)), values)

    def begin_pass(self, number: int) -> tuple[int, bool, Mapping[str, Any]]:
        """Prepare for the replays of a backward pass: compare the settings around it, and rebuild the context."""
        context = {} if self._context is None else self._context.rebuilt()
        self.backward_pass = number, self.environment.is_current(), context
        return self.backward_pass

    def context_now(self, context: Mapping[str, Any]) -> RecordedContext | None:
        """The context as a step gets it; None if nothing in it can change, so that all steps get the same."""
        if self._context is None or not self._context.can_change:
            return None
        if not self._context.is_current(context):
            self._context = RecordedContext(context, is_inside_tape=True)
        return self._context


def leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same storage and version counter, as the start of a new graph."""
    detached = tensor.detach()
    return detached.requires_grad_() if requires_grad else detached
