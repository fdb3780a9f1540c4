"""What a layer returns besides its hidden states, learned from a trial run.

NOTE [What a layer returns besides its hidden states]
 A layer may return its hidden states alone or as the first item of a tuple. Only the last layer of a converted list
 runs when it is called, so it must be known beforehand what the others return. Each layer is therefore run once, on
 the first call of its kind. In the other places of the tuple the caller then gets None where the layer returned
 None, the argument where it returned one of its arguments, and a placeholder for a tensor that it computed (attention
 weights), which may be discarded; using it is an error.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrograde.engine.preserve import preserve

from ._placeholder import placeholder

UNKNOWN = (
    "A converted layer returned tensors besides its hidden states, such as attention weights, which do not exist: it "
    "runs later, when the last layer is called. Ask for them under conversion.original(), in eval after the recipe "
    "'bdia', or use the recipe 'unchanged'."
)
COMPUTED = "a tensor that the layer computed"  # in the place of an argument's name
Result = TypeVar("Result")


def run_isolated(layer: nn.Module, device: torch.device, run: Callable[[], Result]) -> Result:
    """Run something on a layer without gradients and without a trace in its flags, buffers and generators.

    It runs in its own context, so that code that records outputs in context variables (transformers) does not see it.
    """
    with preserve(layer, devices=[device]), torch.no_grad():
        return contextvars.Context().run(run)


@dataclass(frozen=True)
class ReturnForm:
    """What a layer returns: its hidden states alone (`rest` is None), or first in a tuple or list.

    An item of `rest` is the name of the argument that the layer returns, COMPUTED, or None.
    """

    rest: tuple[str | None, ...] | None = None
    container: type = tuple

    def around(self, hidden: Tensor, arguments: Mapping[str, Any]) -> Any:
        """What the layer's caller gets, with these hidden states."""
        if self.rest is None:
            return hidden
        return self.container([hidden, *(_substitute(item, hidden, arguments) for item in self.rest)])


def _substitute(item: str | None, hidden: Tensor, arguments: Mapping[str, Any]) -> Any:
    if item != COMPUTED:
        return None if item is None else arguments[item]
    unknown = placeholder(hidden, (), UNKNOWN)
    unknown.retrograde_unknown = True  # type: ignore[attr-defined]
    return unknown


def kind_of_call(arguments: Mapping[str, Any], training: bool) -> tuple[Any, ...]:
    """What decides the form of the returned value: the flags, and which arguments are None."""
    return training, *((name, value) for name, value in arguments.items() if value is None or isinstance(value, bool))


def return_form(layer: nn.Module, output: Any, arguments: Mapping[str, Any]) -> ReturnForm:
    """The form of what a layer returned; raises if the layer cannot be converted."""
    if isinstance(output, Tensor):
        return ReturnForm()
    rest = tuple(_item(layer, i, value, arguments) for i, value in enumerate(output[1:], start=1))
    if arguments.get("output_attentions") is True and COMPUTED in rest:
        raise ValueError(
            f"output_attentions=True was given, and {type(layer).__name__} returns its attentions together with its "
            "hidden states. In a converted model it runs later, when the last layer is called, so they do not exist "
            "yet. Ask for them under conversion.original(), in eval after the recipe 'bdia', or use the recipe "
            "'unchanged'."
        )
    return ReturnForm(rest, type(output))


def checked_hidden(layer: nn.Module, output: Any, x: Tensor) -> Tensor:
    """The hidden states that a layer returned; raises unless they have the shape that it was given."""
    name = type(layer).__name__
    hidden = output[0] if type(output) in (tuple, list) and output else output
    if not isinstance(hidden, Tensor):
        raise TypeError(
            f"{name} returned a {type(output).__name__}, but a layer can only be converted if it returns its new "
            "hidden states, alone or as the first item of a tuple. Wrap it."
        )
    if hidden.shape != x.shape:
        raise ValueError(
            f"{name} was given hidden states of shape {tuple(x.shape)} and returned {tuple(hidden.shape)}. Only layers "
            "that preserve the shape can be made reversible. If it is a stage with layers inside, name the lists of "
            "these, as in layers='stages.*.blocks'; or use the recipe 'unchanged'."
        )
    return hidden


def _item(layer: nn.Module, index: int, value: Any, arguments: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    for name, given in arguments.items():
        if given is value:
            return name
    if isinstance(value, Tensor):
        return COMPUTED
    raise TypeError(
        f"{type(layer).__name__} returned a value of type {type(value).__name__} as item {index}, besides its hidden "
        "states. In a converted model it runs later, when the last layer is called, and the value is not known before "
        "that. Such an item can only be None, a tensor that is not used, or one of the layer's arguments."
    )
