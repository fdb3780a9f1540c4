"""The work of a run, counted: the same run always has the same amount, whatever else the machine does.

NOTE [What counts as work]
 Every operator costs the arithmetic that it does, the bytes that it reads and writes, and a call. The rates are those
 of a core of a common processor, and do not matter much: what is compared is the same block in several memory modes,
 which differ by operators that run twice. Views cost a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # see memory_tracker.py
from torch.utils.flop_counter import flop_registry

from retrograde.engine.torch_internals import load_compiler, tree_flatten

_OPERATIONS, _BYTES, _CALL = 5e10, 1e10, 5e-6  # per second, per second, seconds


class WorkCounter(TorchDispatchMode):
    """Counts the operators that run while it is on; `seconds` is their work at nominal rates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        load_compiler()
        self.calls = self.operations = self.bytes = 0

    @property
    def seconds(self) -> float:
        return self.operations / _OPERATIONS + self.bytes / _BYTES + self.calls * _CALL

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        count: Callable[..., int] | None = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.operations += int(count(*args, **(kwargs or {}), out_val=result))
        if not getattr(func, "is_view", False):
            self.bytes += sum(_size(t) for t in tree_flatten((args, kwargs, result))[0] if isinstance(t, Tensor))
        return result


def _size(tensor: Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()
