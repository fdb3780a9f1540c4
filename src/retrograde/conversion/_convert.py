"""`convert`: a model that exists, made reversible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from retrograde._plan import Memory, Plan

from ._find import Branches, find_layers, first_number, list_name
from ._measure import Loss, measure
from ._recipes import Annealed, Recipe, recipe_named
from ._report import Report
from ._stack import ConvertedStack
from ._switches import connect, disconnect

NAME = "retrograde"
Example = Tensor | Sequence[Any] | Mapping[str, Any]


def convert(
    model: nn.Module,
    recipe: str | Recipe = "bdia",
    *,
    layers: str | None = None,
    memory: Memory | Sequence[Memory] | Plan = "reverse",
    exact: bool | int = True,
    branches: Branches = "auto",
    example: Example | None = None,
    loss: Loss | None = None,
) -> Conversion:
    """Make the layers of a model reversible, in place and with the same parameters under the same names.

    The model is called as before, and its checkpoints load into the stock model and back.

    Args:
        model: a module with an `nn.ModuleList` of residual layers that it calls in a row: most models of transformers,
            `nn.TransformerEncoder`, or your own.
        recipe: "bdia", "two_stream", "momentum", "scaled" or "annealed"; or one of `retrograde.conversion.recipes` with
            values of its own. Only "bdia" and "annealed" at its start leave the function as it is.
        layers: the list's name, as in "transformer.h"; needed where there are several. "encoder.block[1:]" leaves the
            first layer as it is.
        memory: how the backward pass gets its activations, as in `ReversibleSequence`.
        exact: streams on a grid, so that the inverse is exact to the bit; a number gives the grid's bits. False is
            for "two_stream", whose inverse rounds but does not magnify.
        branches: whether a recipe that needs it takes attention and feed-forward apart: "auto", "split" or "whole".
        example: a batch for the model (a tensor, a tuple or a mapping); the report is made of it.
        loss: makes a scalar of the model's output, for the report; by default its `loss`, or the mean square of its
            logits.

    Examples:
        >>> import torch, retrograde as rg
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> conversion = rg.convert(model, "bdia", example=torch.randn(2, 5, 16))
        >>> conversion.report.logits_difference, conversion.report.gradient_error
        (0.0, 0.0)
    """
    chosen = recipe_named(recipe)
    if exact is False and type(chosen).__name__ == "BDIA":
        raise ValueError(
            "BDIA halves a stream in every layer, so that its inverse without a grid doubles the rounding error each "
            "time. Leave exact=True, or use memory='checkpoint'."
        )
    name, found = find_layers(model, layers)
    owner = _owner(model, list_name(name))
    stacks = [module for module in model.modules() if isinstance(module, ConvertedStack)]
    if any(stock.layer is layer for stack in stacks for stock in stack.stocks for layer in found):
        raise ValueError(f"{name!r} of {type(model).__name__} is converted already; undo() that conversion first.")
    _refuse_left_out_layers(owner, name)
    stack = ConvertedStack(found, chosen, memory=memory, exact=exact, branches=branches, first=first_number(name))
    stack.train(found[0].training)
    stack.install()
    own_name = NAME if not hasattr(owner, NAME) else f"{NAME}_{name.rpartition('.')[2]}"
    owner.add_module(own_name, stack)
    connect(model, stack)
    conversion = Conversion(model, stack, name, owner, own_name)
    if example is not None:
        args, kwargs = _as_call(example)
        conversion.measure(*args, loss=loss, **kwargs)
    return conversion


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Where the stack is put: the module around the layers, but no list, which a model may walk through."""
    owner = name.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        owner = owner.rpartition(".")[0]
    return model.get_submodule(owner)


def _refuse_left_out_layers(owner: nn.Module, name: str) -> None:
    """Raise for a module that leaves out some of its layers at random, as the switch of transformers says."""
    for place, holder in (("layerdrop", owner), ("config.layerdrop", getattr(owner, "config", None))):
        if probability := getattr(holder, "layerdrop", 0):
            raise ValueError(
                f"{type(owner).__name__} leaves out layers of {name!r} at random in training ({place}={probability}), "
                "but a converted list runs as one stack, when its last layer is called. Set it to 0 before you "
                "convert."
            )


def _as_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example,) if isinstance(example, Tensor) else tuple(example), {}


@dataclass
class Conversion:
    """A model whose layers were made reversible.

    `model` is the model, `stack` the reversible stack in it, `report` the last report made by `measure`.
    """

    model: nn.Module
    stack: ConvertedStack
    layers: str
    _owner: nn.Module
    _own_name: str
    report: Report | None = None

    def measure(self, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Report:
        """Compare the model with what it was, on one batch: outputs, gradients, drift and memory.

        Parameters, gradients, buffers and generators are left as they were.
        """
        self.report = measure(self.model, self.stack, args, kwargs, loss)
        return self.report

    def stock(self) -> AbstractContextManager[None]:
        """A context in which the model runs as it was."""
        return self.stack.routed("stock")

    def anneal(self, gamma: float) -> None:
        """Move the recipe "annealed" on: 0 is the network as it was, 1 the leapfrog without side bits."""
        if not isinstance(self.stack.recipe, Annealed):
            raise ValueError(f"anneal is for the recipe 'annealed', not for {self.stack.recipe}.")
        self.stack.change(replace(self.stack.recipe, gamma=gamma))

    def undo(self) -> nn.Module:
        """Make the model what it was, with the parameters as they are now."""
        self.stack.remove()
        disconnect(self.model, self.stack)
        delattr(self._owner, self._own_name)
        return self.model
