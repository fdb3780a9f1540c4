"""The work of a run, counted: the same run always has the same amount, whatever else the machine does.

NOTE [What counts as work]
 Every operator costs the arithmetic that it does, the bytes that it reads and writes, and a call. The rates are those
 of a core of a common processor, and do not matter much: what is compared is the same block in several memory modes,
 which differ by operators that run twice. Views cost a call. Random numbers on the CPU, one by one, cost more than the
 bytes that they fill: dropout of an attention matrix can take longer than the products around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # see memory_tracker.py
from torch.utils.flop_counter import flop_registry

from retrograde.engine.torch_internals import load_compiler, tree_flatten

_OPERATIONS, _BYTES, _CALL = 5e10, 1e10, 5e-6  # per second, per second, seconds
_DRAW = 4e-9  # seconds per random number


def _attention(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """The operations of two products: of the queries and keys, and of the result and the values."""
    return 4 * int(query.numel()) * int(key.shape[-2])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    return 5 * _attention(query, key) // 2


_COUNTS: dict[Any, Callable[..., int]] = {  # which torch's own list does not have
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class WorkCounter(TorchDispatchMode):
    """Counts the operators that run while it is on; `seconds` is their work at nominal rates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        load_compiler()
        self.calls = self.operations = self.bytes = self.draws = 0

    @property
    def seconds(self) -> float:
        return self.operations / _OPERATIONS + self.bytes / _BYTES + self.calls * _CALL + self.draws * _DRAW

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        operator = getattr(func, "_overloadpacket", None)
        count: Callable[..., int] | None = flop_registry.get(operator, _COUNTS.get(operator))
        if count is not None:
            self.operations += int(count(*args, **(kwargs or {}), out_val=result))
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += _drawn(result)
        if not getattr(func, "is_view", False):
            self.bytes += sum(_size(t) for t in tree_flatten((args, kwargs, result))[0] if isinstance(t, Tensor))
        return result


def _size(tensor: Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


def _drawn(result: Any) -> int:
    """How many numbers were drawn on the CPU: one for each entry of the first result."""
    drawn: Tensor | None = next((t for t in tree_flatten(result)[0] if isinstance(t, Tensor)), None)
    return int(drawn.numel()) if drawn is not None and drawn.device.type == "cpu" else 0
