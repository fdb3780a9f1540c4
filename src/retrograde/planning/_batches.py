"""Batches as a factory gives them, and outputs as a model returns them: tensors in containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of the model."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def call(model: nn.Module, batch: Any) -> Any:
    """What the model returns for a batch."""
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [t for item in value for t in tensors_in(item)]
    return []
