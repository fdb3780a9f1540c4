"""The context of a call as a step's first run had it, for the step's replay."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from . import rng
from .saved_streams import SavedStreams
from .torch_internals import tree_flatten, tree_unflatten

_NOT_OPAQUE = (Tensor, nn.Module, type, types.FunctionType, types.ModuleType)


class RecordedContext:
    """The context now. Lists and dictionaries in it are copied; of objects, the attributes.

    Tensors are saved as autograd saves its own, without the graph that produced them. If something in the context can
    change, one of these is kept for all steps that got the same.
    """

    __slots__ = ("_contents", "_objects", "_saved", "_spec", "_tensors", "devices", "leaves")

    def __init__(self, context: Mapping[str, Any], *, is_inside_tape: bool = False) -> None:
        leaves, self._spec = tree_flatten(dict(context))
        tensors = {i: value for i, value in enumerate(leaves) if isinstance(value, Tensor)}
        distinct = tuple({id(t): t for t in tensors.values()}.values())  # one with two names is one in a replay
        numbers = {id(t): number for number, t in enumerate(distinct)}
        self._tensors = [(i, numbers[id(t)]) for i, t in tensors.items()]
        self.leaves = [None if isinstance(value, Tensor) else value for value in leaves]
        self.devices = [t.device for t in distinct]
        values = tuple(map(without_graph, distinct))
        self._saved = SavedStreams(values, is_inside_tape=is_inside_tape) if values else None
        objects = [vars(value) for value in self.leaves if _is_opaque(value)]
        self._objects = [(attributes, _copied(attributes)) for attributes in objects]
        self._contents = self._contents_of(context)

    @property
    def can_change(self) -> bool:
        """Whether something in it can change while the blocks run, or after."""
        return bool(self._contents)

    def is_current(self, context: Mapping[str, Any]) -> bool:
        """Whether lists, dictionaries and objects have the same contents as when it was recorded."""
        return self._contents_of(context) == self._contents

    def _contents_of(self, context: Mapping[str, Any]) -> list[Any]:
        """What is in them now. They are not held: one may hold tensors whose graph holds the tape that holds this."""
        return [*map(_contents, _mutable_in(list(context.values()))), *(_contents(a) for a, _ in self._objects)]

    def rebuilt(self) -> Mapping[str, Any]:
        """The context, without its producer's graph, in lists and dictionaries of its own."""
        leaves = list(self.leaves)
        if self._saved is not None:
            tensors = self._saved.tensors()
            for i, number in self._tensors:
                leaves[i] = tensors[number]
        context: Mapping[str, Any] = tree_unflatten(leaves, self._spec)
        return context

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which objects have the attributes that they had; afterwards those from before."""
        with ExitStack() as undo:
            for attributes, then in self._objects:
                if _contents(attributes) != _contents(then):
                    undo.callback(_replace, attributes, dict(attributes))
                    _replace(attributes, then)
            yield


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor itself if it has no graph (nested tensors know their offsets by identity); otherwise a leaf."""
    if not tensor.requires_grad:
        return tensor
    return tensor.detach().requires_grad_()


def _is_opaque(value: Any) -> bool:
    """Whether a value is an object with attributes that may change."""
    return hasattr(value, "__dict__") and not isinstance(value, _NOT_OPAQUE) and not rng.is_generator(value)


def _mutable_in(values: list[Any]) -> list[Any]:
    """The lists and dictionaries among some values, and in them."""
    mutable = []
    for value in values:  # the list grows as it is walked
        if isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, dict):
            values += value.values()
        if isinstance(value, (list, dict)):
            mutable.append(value)
    return mutable


def _contents(container: Any) -> list[Any]:
    """What is in a container, by identity; numbers and strings by their values."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, value if isinstance(value, (int, float, str)) else id(value)) for key, value in items]


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: without_graph(v) if isinstance(v, Tensor) else v for name, v in attributes.items()}


def _replace(attributes: dict[str, Any], by: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(by)
