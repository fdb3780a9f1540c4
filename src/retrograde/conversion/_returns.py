"""A layer run once beside the model's own call, without a trace, to see what it returns.

NOTE [What a layer returns beside its hidden states]
 A layer may return its hidden states alone or as the first of a tuple. Only the last layer of a converted list runs
 when it is called, so the others must know beforehand what their callers are to get. Each layer is tried
 once, on the first call of its kind. At the other places of the tuple the caller then gets None where the layer
 returned None, the argument where it returned an argument of its own, and for a tensor that it computed (attention
 weights) a NaN of no dimensions. That NaN may be thrown away, but no layer of the list may be handed it.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrograde._before import Before

Result = TypeVar("Result")


def aside(layer: nn.Module, device: torch.device, run: Callable[[], Result]) -> Result:
    """Run something on a layer without gradients, and leave flags, buffers and generators as they were.

    In a context of its own, in which nobody who records outputs by context variables (transformers does) sees it.
    """
    flags = [(module, module.training) for module in layer.modules()]
    before = Before([layer], [device])
    try:
        with torch.no_grad():
            return contextvars.Context().run(run)
    finally:
        for module, flag in flags:
            module.training = flag
        before.restore()


@dataclass(frozen=True)
class Argument:
    """In the place of an argument that a layer returns as it is."""

    name: str


@dataclass(frozen=True)
class Computed:
    """In the place of a tensor that a layer computed beside its hidden states."""


@dataclass(frozen=True)
class Returns:
    """What a layer returns: its hidden states alone (`rest` is None), or as the first of a tuple or a list."""

    rest: tuple[Argument | Computed | None, ...] | None = None
    form: type = tuple

    def around(self, hidden: Tensor, arguments: Mapping[str, Any]) -> Any:
        """What the caller of the layer gets, with these hidden states."""
        if self.rest is None:
            return hidden
        return self.form([hidden, *(_stand_in(place, hidden, arguments) for place in self.rest)])


def _stand_in(place: Argument | Computed | None, hidden: Tensor, arguments: Mapping[str, Any]) -> Any:
    if isinstance(place, Argument):
        return arguments[place.name]
    if place is None:
        return None
    nan = hidden.detach().new_full((), float("nan"))
    nan.retrograde_unknown = True  # type: ignore[attr-defined]
    return nan


def hidden_of(output: Any) -> Any:
    """The hidden states in what a layer returned."""
    return output[0] if type(output) in (tuple, list) and output else output


def kind_of(arguments: Mapping[str, Any], training: bool) -> tuple[Any, ...]:
    """What decides over the form of what a layer returns: its flags, and which arguments there are."""
    return training, *((name, value) for name, value in arguments.items() if value is None or isinstance(value, bool))


def without_writing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with copies of what layers write into: key-value caches, lists and dictionaries of states."""
    return {name: _copied(value) for name, value in arguments.items()}


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied_tensor(v) for v in value]
    if type(value) is dict:
        return {k: _copied_tensor(v) for k, v in value.items()}
    if hasattr(value, "get_seq_length"):  # its keys may have a graph (prefix tuning), which deepcopy refuses
        return copy.deepcopy(value, {id(t): _copied_tensor(t) for t in _tensors_in(value, set())})
    return value


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
        for part in vars(value).values() if parts is None and hasattr(value, "__dict__") else parts or ():
            yield from _tensors_in(part, seen)


def _copied_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def returned(layer: nn.Module, output: Any, x: Tensor, arguments: Mapping[str, Any]) -> Returns:
    """The form of what a layer returned, for a layer that can be converted."""
    check_hidden(layer, output, x)
    if isinstance(output, Tensor):
        return Returns()
    rest = tuple(_place(layer, i, value, arguments) for i, value in enumerate(output[1:], start=1))
    if arguments.get("output_attentions") is True and Computed() in rest:
        raise ValueError(
            f"output_attentions=True was given, and {type(layer).__name__} returns its attentions beside its hidden "
            "states: in a converted model it runs later, when the last layer is called, and has none to give. Ask for "
            "them under conversion.stock(), or in eval after the recipe 'bdia'."
        )
    return Returns(rest, type(output))


def check_hidden(layer: nn.Module, output: Any, x: Tensor) -> None:
    """Raise unless a layer returned hidden states like those it was given."""
    name, hidden = type(layer).__name__, hidden_of(output)
    if not isinstance(hidden, Tensor):
        raise TypeError(
            f"{name} returned a {type(output).__name__}, but a layer that is converted returns its new hidden states, "
            "alone or as the first of a tuple. Wrap it."
        )
    if hidden.shape != x.shape:
        raise ValueError(
            f"{name} was given hidden states of shape {tuple(x.shape)} and returned {tuple(hidden.shape)}. Only layers "
            "that keep the shape can be made reversible. If it is a stage with layers inside, name the list of these "
            "(layers=), and call convert once for each stage."
        )


def _place(layer: nn.Module, index: int, value: Any, arguments: Mapping[str, Any]) -> Argument | Computed | None:
    if value is None:
        return None
    same = next((name for name, given in arguments.items() if given is value), None)
    if same is not None:
        return Argument(same)
    if isinstance(value, Tensor):
        return Computed()
    raise TypeError(
        f"{type(layer).__name__} returned a {type(value).__name__} in place {index} beside its hidden states. In a "
        "converted model it runs later, when the last layer is called, and what it would return is not known before "
        "that. Only None, tensors that nobody needs, and its own arguments can stand there."
    )
