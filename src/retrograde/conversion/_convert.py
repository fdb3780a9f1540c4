"""`convert`: make an existing model reversible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retrograde.memory import Memory

from ._find import Branches, find_layers, first_index, list_name
from ._gradient_checkpointing import map_converted, unmap_converted
from ._recipes import BDIA, Annealed, Recipe, recipe_named
from ._report import Report
from ._stack import ConvertedStack

if TYPE_CHECKING:
    from retrograde.measure.loss import Loss

NAME = "retrograde"
Batch = Tensor | Sequence[Any] | Mapping[str, Any]


def convert(
    model: nn.Module,
    recipe: str | Recipe = "bdia",
    *,
    layers: str | None = None,
    memory: Memory = "reverse",
    exact: bool = True,
    grid_bits: int | None = None,
    branches: Branches = "auto",
    batch: Batch | None = None,
    loss: Loss | None = None,
) -> Conversion:
    """Make the layers of a model reversible, in place and with the same parameters under the same names.

    The model is called as before, and its checkpoints load into the original model and back.

    Args:
        model: a module that calls the residual layers of an `nn.ModuleList` in a row: most Hugging Face Transformers
            models, `nn.TransformerEncoder`, or your own.
        recipe: "bdia", "two_stream", "momentum", "scaled" or "annealed"; or one of `retrograde.conversion.recipes` with
            its own values. Only "bdia" in eval, and "annealed" at its start, leave the model's function unchanged.
        layers: the name of the list, such as "transformer.h"; needed if the model has several. "encoder.block[1:]"
            leaves the first layer unconverted.
        memory: how the backward pass gets its activations, as in `ReversibleSequence`.
        exact: put the streams on a grid, so that the inverse is exact to the bit. False is for "two_stream", whose
            inverse rounds without amplifying errors.
        grid_bits: the grid's spacing is 2^-grid_bits, as in `ReversibleSequence`.
        branches: whether recipes that can do so separate attention and feed-forward: "auto", "split" or "whole".
        batch: a batch for the model, to make a report: a tensor, a tuple of positional arguments, or a mapping of
            keyword arguments.
        loss: makes a scalar of the model's output, for the report; by default the output's own `loss`, or the distance
            of the output from fixed random numbers.

    Examples:
        >>> import torch, retrograde as rg
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> conversion = rg.convert(model, "bdia", batch=torch.randn(2, 5, 16))
        >>> conversion
        Conversion(TransformerEncoder, recipe=BDIA(), layers='layers' (4), memory='reverse')
        >>> conversion.report.logits_difference, conversion.report.gradient_error
        (0.0, 0.0)
    """
    recipe = recipe_named(recipe)
    if not exact and isinstance(recipe, BDIA):
        raise ValueError(
            "BDIA halves a stream in every layer, so without a grid its inverse doubles the rounding error in every "
            "layer. Leave exact=True, or choose another recipe."
        )
    name, chosen = find_layers(model, layers)
    _check_not_converted(model, name, chosen)
    owner = _owner(model, list_name(name))
    _check_no_layer_drop(owner, name)
    stack = ConvertedStack(
        chosen, recipe, memory=memory, exact=exact, grid_bits=grid_bits, branches=branches, first=first_index(name)
    )
    stack.train(chosen[0].training)
    stack.install()
    own_name = NAME if not hasattr(owner, NAME) else f"{NAME}_{name.rpartition('.')[2]}"
    owner.add_module(own_name, stack)
    map_converted(model, stack)
    conversion = Conversion(model, stack, name, owner, own_name)
    if batch is not None:
        conversion.measure(batch, loss=loss)
    return conversion


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Where the stack is put: the module around the layers, but no list, over which the model may iterate."""
    owner = name.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        owner = owner.rpartition(".")[0]
    return model.get_submodule(owner)


def _check_not_converted(model: nn.Module, name: str, layers: Sequence[nn.Module]) -> None:
    stacks = [module for module in model.modules() if isinstance(module, ConvertedStack)]
    converted = {id(original.layer) for stack in stacks for original in stack.originals}
    if any(id(layer) in converted for layer in layers):
        raise ValueError(f"{name!r} of {type(model).__name__} is converted already; undo() that conversion first.")


def _check_no_layer_drop(owner: nn.Module, name: str) -> None:
    """Raise for a module that skips layers at random, by the option that Hugging Face Transformers models have."""
    for option, holder in (("layerdrop", owner), ("config.layerdrop", getattr(owner, "config", None))):
        if probability := getattr(holder, "layerdrop", 0):
            raise ValueError(
                f"{type(owner).__name__} skips layers of {name!r} at random in training ({option}={probability}), "
                "but a converted list runs as one stack, when its last layer is called. Set it to 0 before you "
                "convert."
            )


@dataclass(repr=False)
class Conversion:
    """A model whose layers were made reversible.

    `model` is the model, `stack` the reversible stack in it, `layers` the name of the converted list, and `report` the
    last report made by `measure`.
    """

    model: nn.Module
    stack: ConvertedStack
    layers: str
    _owner: nn.Module
    _own_name: str
    report: Report | None = None

    def __repr__(self) -> str:
        plan = self.stack.memory
        memory = str(plan.memory[0] if len(set(plan.memory)) == 1 else plan)
        return (
            f"Conversion({type(self.model).__name__}, recipe={self.stack.recipe}, layers={self.layers!r} "
            f"({len(self.stack)}), memory={memory!r})"
        )

    def measure(self, batch: Batch, *, loss: Loss | None = None) -> Report:
        """Compare the model with the original one on a batch: outputs, gradients, drift and memory.

        Parameters, gradients, buffers and generators are left as they were.
        """
        from ._measure import measure  # here, so that `import retrograde` loads no measuring tool

        self.report = measure(self.model, self.stack, batch, loss)
        return self.report

    def original(self) -> AbstractContextManager[None]:
        """A context in which the model runs with its original layers."""
        return self.stack.routed("original")

    def anneal(self, gamma: float) -> None:
        """Set γ of the recipe "annealed": 0 is the original network, 1 the leapfrog scheme without extra bits."""
        if not isinstance(self.stack.recipe, Annealed):
            raise ValueError(f"anneal is for the recipe 'annealed', not for {self.stack.recipe}.")
        self.stack.change_recipe(replace(self.stack.recipe, gamma=gamma))

    def undo(self) -> nn.Module:
        """Give the model its original layers back, with the parameters that they have now."""
        self.stack.remove()
        unmap_converted(self.model, self.stack)
        delattr(self._owner, self._own_name)
        return self.model
