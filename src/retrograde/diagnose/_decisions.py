"""Discrete choices of a branch: the indices that top-k, argmax, sort and the like return in its runs.

A recomputed stream differs by rounding from the first one, and a choice between near equals may then flip. The
gradients of a branch that chose differently are those of another function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # as in measure.memory_tracker

Repeat = Literal["free", "forced"]
_ATEN = torch.ops.aten
_CHOOSING = {
    _ATEN.topk, _ATEN.sort, _ATEN.argsort, _ATEN.argmax, _ATEN.argmin, _ATEN.max, _ATEN.min, _ATEN.kthvalue,
    _ATEN.median, _ATEN.nanmedian, _ATEN.mode, _ATEN.searchsorted, _ATEN.bucketize,
}  # fmt: skip


def _indices(func: Any, result: Any) -> Tensor | None:
    """The indices that an operator chose, if it is one that chooses."""
    if func.overloadpacket not in _CHOOSING:
        return None
    indices: Tensor = result[1] if isinstance(result, (tuple, list)) else result
    return indices if not indices.is_floating_point() else None  # max without a dimension returns no index


class FirstChoices(TorchDispatchMode):
    """Writes down the indices that are chosen while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (indices := _indices(func, result)) is not None:
            self.chosen.append(indices.detach().clone())
        return result


class SecondChoices(TorchDispatchMode):
    """Counts the indices that are chosen differently than the first time.

    Args:
        chosen: what was chosen the first time, in order.
        repeat: "free" lets the operators choose again, "forced" makes them choose what they chose the first time.
    """

    def __init__(self, chosen: list[Tensor], repeat: Repeat = "free") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chosen = list(reversed(chosen))
        self._forced = repeat == "forced"
        self.flips = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        indices = _indices(func, result)
        if indices is None:
            return result
        first = self._chosen.pop() if self._chosen else None
        if first is None or first.shape != indices.shape:
            self.flips += indices.numel()
            return result
        if self._forced:
            return _as_first(func, args, kwargs, result, first)
        self.flips += int((indices != first).sum())
        return result


def _as_first(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, first: Tensor) -> Any:
    """The operator's result with the indices of the first run, and the values that are there now."""
    if isinstance(result, Tensor):
        return first.clone()
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    dim, source = given["dim"], args[0]
    if source.ndim == 0:
        return type(result)((source.clone(), first.clone()))
    keeps_dim = first.ndim == source.ndim
    values = source.gather(dim, first if keeps_dim else first.unsqueeze(dim))
    return type(result)((values if keeps_dim else values.squeeze(dim), first.clone()))
