"""The one convention for a model's batch: a tensor, a tuple of positional or a mapping of keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from retrograde.engine.torch_internals import tree_map


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the positional and keyword arguments of the model."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def call(model: nn.Module, batch: Any) -> Any:
    """What the model returns for a batch."""
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def detached_leaf(value: Any) -> Any:
    """A tensor without the graph that made it, and with a gradient of its own; other values are returned unchanged."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def own_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one training step, which leaves no gradient in the batch and no graph behind it used up."""
    args, kwargs = tree_map(detached_leaf, arguments(batch))
    return args, kwargs


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers, dataclasses among them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [t for item in value for t in tensors_in(item)]
    return []
