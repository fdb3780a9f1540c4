"""`convert`: make an existing model trainable in less memory, reversibly or unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retrograde.memory import Memory

from ._find import CONTAINERS, LayerList, Layers, find_layers
from ._gradient_checkpointing import map_converted, unmap_converted
from ._layers import Branches
from ._recipes import BDIA, Annealed, Momentum, Recipe, recipe_named
from ._report import Report
from ._stack import ConvertedStack

if TYPE_CHECKING:
    from retrograde.measure.loss import Loss

NAME = "retrograde"
Batch = Tensor | Sequence[Any] | Mapping[str, Any]


def convert(
    model: nn.Module,
    recipe: str | Recipe = "unchanged",
    *,
    layers: Layers = None,
    memory: Memory = "reverse",
    exact: bool = True,
    grid_bits: int | None = None,
    branches: Branches = "auto",
    batch: Batch | None = None,
    loss: Loss | None = None,
) -> Conversion:
    """Make a model train in less activation memory, in place and with the same parameters under the same names.

    The model is called as before, and its checkpoints load into the original model and back.

    Args:
        model: a module that calls the residual layers of an `nn.ModuleList` or `nn.Sequential` in a row: most Hugging
            Face Transformers, Diffusers and timm models, `nn.TransformerEncoder`, or your own.
        recipe: "unchanged" (the default), "bdia", "two_stream", "momentum", "scaled" or "annealed"; or one of
            `retrograde.conversion.recipes` with its own values. "unchanged" leaves the model's function unchanged and
            recomputes from saved inputs; the others are reversible, and training computes another function. Of these,
            only "bdia" in eval, and "annealed" at its start, compute the original one.
        layers: the name of the list, such as "transformer.h"; needed if the model has several. Several names, or a
            pattern such as "stages.*.blocks", convert several lists. "encoder.block[1:]" leaves the first layer
            unconverted.
        memory: how the backward pass gets its activations, as in `ReversibleSequence`; "reverse" means "checkpoint"
            for the recipe "unchanged".
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
    places = find_layers(model, layers)
    _check_not_converted(model, places)
    for place in places:
        _check_no_layer_drop(_owner(model, place), place, recipe)
    stacks = [
        ConvertedStack(place, recipe, memory=memory, exact=exact, grid_bits=grid_bits, branches=branches)
        for place in places
    ]  # all of them before the first one is put into the model
    conversion = Conversion(model, {})
    for place, stack in zip(places, stacks, strict=True):
        owner = _owner(model, place)
        name = _free_name(owner, place)
        stack.train(place.layers[0].training)
        stack.install()
        owner.add_module(name, stack)
        map_converted(model, stack)
        conversion.stacks[place.path] = stack
        conversion._owners.append((owner, name))
    if batch is not None:
        conversion.measure(batch, loss=loss)
    return conversion


def _owner(model: nn.Module, place: LayerList) -> nn.Module:
    """Where the stack is put: the module around the layers, but no list, over which the model may iterate.

    If the model itself is a list, the stack is put into the last layer.
    """
    owner = place.name.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), (*CONTAINERS, nn.ModuleDict)):
        owner = owner.rpartition(".")[0]
    module = model.get_submodule(owner)
    return place.layers[-1] if isinstance(module, CONTAINERS) else module


def _free_name(owner: nn.Module, place: LayerList) -> str:
    """A name for the stack that its owner does not have yet."""
    names = [NAME, f"{NAME}_{place.path.rpartition('.')[2]}", f"{NAME}_{place.path.replace('.', '_')}"]
    return next(name for name in names if not hasattr(owner, name))


def _check_not_converted(model: nn.Module, places: Sequence[LayerList]) -> None:
    stacks = [module for module in model.modules() if isinstance(module, ConvertedStack)]
    taken = {id(original.layer): "is converted already" for stack in stacks for original in stack.originals}
    for place in places:
        for layer in place.layers:
            if id(layer) in taken:
                raise ValueError(
                    f"{place.path!r} of {type(model).__name__} {taken[id(layer)]} (or some of its layers). A layer is "
                    "converted once: call undo() of that conversion first, or name other layers."
                )
            taken[id(layer)] = "was named twice"


def _check_no_layer_drop(owner: nn.Module, place: LayerList, recipe: Recipe) -> None:
    """Raise for a module that skips layers at random, by the option that Hugging Face Transformers models have."""
    for option, holder in (("layerdrop", owner), ("config.layerdrop", getattr(owner, "config", None))):
        if recipe.has_inverse and (probability := getattr(holder, "layerdrop", 0)):
            raise ValueError(
                f"{type(owner).__name__} skips layers of {place.path!r} at random in training "
                f"({option}={probability}), but a converted list runs as one stack, when its last layer is called. Set "
                "it to 0 before you convert, or use the recipe 'unchanged'."
            )


@dataclass(repr=False)
class Conversion:
    """A model whose layers were converted.

    `model` is the model, `stacks` the stacks in it by the names of the converted lists, and `report` the last report
    made by `measure`.
    """

    model: nn.Module
    stacks: dict[str, ConvertedStack]
    report: Report | None = None
    _owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def __repr__(self) -> str:
        lists = ", ".join(f"{name!r} ({len(stack)})" for name, stack in self.stacks.items())
        plans = dict.fromkeys(_memory_of(stack) for stack in self.stacks.values())
        recipe = next(iter(self.stacks.values())).recipe
        memory = ", ".join(map(repr, plans))
        return f"Conversion({type(self.model).__name__}, recipe={recipe}, layers={lists}, memory={memory})"

    @property
    def stack(self) -> ConvertedStack:
        """The stack, of a conversion of one list."""
        if len(self.stacks) > 1:
            raise ValueError(
                f"This conversion has {len(self.stacks)} stacks: choose one, as in "
                f"conversion.stacks[{next(iter(self.stacks))!r}]."
            )
        return next(iter(self.stacks.values()))

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the converted lists."""
        return tuple(self.stacks)

    def measure(self, batch: Batch, *, loss: Loss | None = None) -> Report:
        """Compare the model with the original one on a batch: outputs, gradients, drift and memory.

        Parameters, gradients, buffers and generators are left as they were.
        """
        from ._measure import measure  # here, so that `import retrograde` loads no measuring tool

        self._check_not_undone()
        self.report = measure(self.model, list(self.stacks.values()), batch, loss)
        return self.report

    @contextmanager
    def original(self) -> Iterator[None]:
        """A context in which the model runs with its original layers."""
        with ExitStack() as routes:
            for stack in self.stacks.values():
                routes.enter_context(stack.routed("original"))
            yield

    def anneal(self, value: float) -> None:
        """Set the coefficient of the recipe "annealed" (γ) or "momentum" (β) in the middle of training.

        "annealed" is the original network at 0, and the leapfrog scheme without extra bits at 1. "momentum" is near the
        original network for a small β, and needs one extra bit from 1/2 on.
        """
        for stack in self.stacks.values():
            recipe = stack.recipe
            if isinstance(recipe, Annealed):
                stack.change_recipe(replace(recipe, gamma=value))
            elif isinstance(recipe, Momentum):
                stack.change_recipe(replace(recipe, beta=value))
            else:
                raise ValueError(f"anneal is for the recipes 'annealed' and 'momentum', not for {recipe}.")

    def undo(self) -> nn.Module:
        """Give the model its original layers back, with the parameters that they have now."""
        self._check_not_undone()
        for stack in self.stacks.values():
            stack.remove()
            unmap_converted(self.model, stack)
        for owner, name in self._owners:
            delattr(owner, name)
        self._owners.clear()
        return self.model

    def _check_not_undone(self) -> None:
        if not self._owners:
            raise RuntimeError(
                f"This conversion of {type(self.model).__name__} was undone already: the model has its original layers."
            )


def _memory_of(stack: ConvertedStack) -> str:
    plan = stack.memory
    return str(plan.memory[0] if len(set(plan.memory)) == 1 else plan)
