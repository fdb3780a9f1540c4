"""Where a model has its layers in a row, and what the two residual branches of a layer are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from retrograde.engine.drift import relative_error
from retrograde.engine.preserve import StateSnapshot
from retrograde.engine.rng import torch_generators

from ._returns import checked_hidden, run_isolated

Branches = Literal["auto", "split", "whole"]
INPUT = "the layer's own input"  # stands for an argument that is the input once more, as in layer(x, x, x)

# The names that layers give to their parts, in transformers and in most people's code.
FIRST_NORMS = ("ln_1", "input_layernorm", "layernorm_before", "norm1", "ln1", "layer_norm1", "attn_norm", "norm_1")
ATTENTIONS = ("attn", "self_attn", "attention", "self_attention")
SECOND_NORMS = (
    "ln_2", "post_attention_layernorm", "layernorm_after", "norm2", "ln2", "layer_norm2", "mlp_norm", "norm_2",
)  # fmt: skip
FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "ff")


def find_layers(model: nn.Module, path: str | None) -> tuple[str, list[nn.Module]]:
    """The list of layers and its name: the one that was named, or the only one in the model."""
    if path is not None:
        return path, _layers_at(model, path)
    lists = list(_lists(model))
    if len(lists) == 1:
        return lists[0][0], list(lists[0][1])
    others = [name for name, _ in _lists(model, classes="several")]
    raise ValueError(
        f"{type(model).__name__} has {len(lists) or 'no'} lists of two or more layers of one class"
        + (f": {', '.join(repr(name) for name, _ in lists)}. " if lists else ". ")
        + (f"Lists of several classes: {', '.join(map(repr, others))}. " if others else "")
        + "Name the nn.ModuleList to convert, as in layers='transformer.h'; call convert once per list."
    )


def list_name(path: str) -> str:
    """The name of the list in a path such as "encoder.block[1:]"."""
    return path.partition("[")[0]


def first_index(path: str) -> int:
    """The index of the first layer that a path names: 1 in "encoder.block[1:]"."""
    start = path.partition("[")[2].partition(":")[0]
    return int(start) if start else 0


def _layers_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The layers of the named list, or those of them that a slice such as "[1:]" selects."""
    name, bounds = list_name(path), re.fullmatch(r"[^\[]*(?:\[(\d*):(\d*)\])?", path)
    try:
        module: nn.Module | None = model.get_submodule(name)
    except AttributeError:
        module = None
    if module is None or bounds is None:
        names = ", ".join(repr(name) for name, _ in _every_list(model))
        raise ValueError(f"{type(model).__name__} has no part {path!r} (layers=). Its lists are {names or 'none'}.")
    if not isinstance(module, nn.ModuleList) or not len(module):
        raise ValueError(f"layers={path!r} is a {type(module).__name__}; name an nn.ModuleList that is not empty.")
    start, stop = (int(bound) if bound else None for bound in bounds.groups())
    layers = list(module)[start:stop]
    if not layers:
        raise ValueError(f"layers={path!r} selects none of the {len(module)} layers of {name!r}.")
    if isinstance(layers[0], (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"layers={path!r} is a list of lists; name one of these, as in layers='{name}.0'.")
    return layers


def _every_list(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


def _lists(model: nn.Module, classes: Literal["one", "several"] = "one") -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of layers of one class, or those of several classes that are in none of these."""
    outer: list[str] = []
    for name, module in _every_list(model):
        if len(module) < 2 or any(name.startswith(prefix) for prefix in outer):
            continue
        number = "one" if len({type(m) for m in module}) == 1 else "several"
        if number == "one" or classes == "several":
            outer.append(f"{name}.")
        if number == classes:
            yield name, module


class OriginalLayer:
    """A layer with the forward that it had before the conversion.

    It looks up the layer's parts when it runs, so that parts exchanged later (by peft) are used.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.own_forward = layer.__dict__.get("forward")  # somebody exchanged it before us
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        if not self.names:
            raise TypeError(f"{type(layer).__name__}.forward takes no positional input, so it is not a layer.")

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The layer's input, and its other arguments by name."""
        if len(args) > len(self.names):
            raise TypeError(
                f"{type(self.layer).__name__} was called with {len(args)} positional arguments, but its forward takes "
                f"{len(self.names)}."
            )
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        hidden = named.pop(self.names[0])
        return hidden, {name: INPUT if value is hidden else value for name, value in named.items()}

    def __call__(self, x: Tensor, arguments: Mapping[str, Any]) -> Any:
        arguments = _with_input(arguments, x)
        if self.own_forward is not None:
            return self.own_forward(x, **arguments)
        return type(self.layer).forward(self.layer, x, **arguments)

    def update(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """The layer's new hidden states."""
        return checked_hidden(self.layer, self(x, arguments), x)


def _with_input(arguments: Mapping[str, Any], x: Tensor) -> dict[str, Any]:
    return {name: x if value is INPUT else value for name, value in arguments.items()}


def sublayers_of(layer: nn.Module) -> tuple[Sublayer, Sublayer] | None:
    """The attention and the feed-forward of a layer, recognised by the names of its parts; None if they are not.

    Also None if the layer has parameters outside of these parts: a scale of ones would go unnoticed.
    """
    if hasattr(layer, "crossattention"):
        return None
    if all(hasattr(layer, name) for name in ("attention", "intermediate", "output")):
        pair = (
            Sublayer(layer, "attention", returns="state"),
            Sublayer(layer, "intermediate", after="output", returns="state"),
        )
    else:
        names = [_first_part(layer, names) for names in (FIRST_NORMS, ATTENTIONS, SECOND_NORMS, FEED_FORWARDS)]
        if None in names:
            return None
        norm1, attention, norm2, feed_forward = names
        dropout = "dropout" if isinstance(getattr(layer, "dropout", None), nn.Dropout) else None
        pair = (
            Sublayer(layer, str(attention), norm=norm1, after=dropout),
            Sublayer(layer, str(feed_forward), norm=norm2, after=dropout),
        )
    used = {id(p) for sublayer in pair for part in sublayer.parts() for p in part.parameters()}
    return pair if all(id(p) in used for p in layer.parameters()) else None


def _first_part(layer: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(layer, name, None), nn.Module)), None)


@dataclass(eq=False)
class Sublayer:
    """One residual branch of a layer: normalisation, then attention or feed-forward, then dropout.

    Args:
        layer: the layer, in which the parts are looked up by name when it runs.
        body: the attention or the feed-forward.
        norm: the normalisation before it.
        after: a dropout after it; or, with `returns="state"`, the part that adds the residual and normalises.
        returns: "update" if the result is added to the input, "state" if it is the new state, as in post-norm layers.
    """

    layer: nn.Module
    body: str
    norm: str | None = None
    after: str | None = None
    returns: Literal["update", "state"] = "update"

    def __post_init__(self) -> None:
        parameters = inspect.signature(type(getattr(self.layer, self.body)).forward).parameters.values()
        self.takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}

    def parts(self) -> list[nn.Module]:
        """The modules that it runs."""
        return [getattr(self.layer, name) for name in (self.norm, self.body, self.after) if name is not None]

    def update(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        layer = self.layer
        taken = {k: v for k, v in _with_input(arguments, x).items() if self.takes is None or k in self.takes}
        result = getattr(layer, self.body)(x if self.norm is None else getattr(layer, self.norm)(x), **taken)
        result = result[0] if isinstance(result, tuple) else result
        if self.after is not None:
            residual = (x,) if self.returns == "state" else ()
            result = getattr(layer, self.after)(result, *residual)
        update: Tensor = result - x if self.returns == "state" else result
        return update


def sublayer_error(
    original: OriginalLayer, pair: tuple[Sublayer, Sublayer], x: Tensor, arguments: Mapping[str, Any]
) -> float:
    """The relative error of the two sublayers, run one after the other, against the layer, in training and in eval."""

    def compare() -> float:
        errors, rng = [], StateSnapshot([], torch_generators([x.device]))
        for mode in (False, True):
            original.layer.train(mode)
            expected = original.update(x, arguments)
            rng.restore()
            between = x + pair[0].update(x, arguments)
            errors.append(relative_error(between + pair[1].update(between, arguments), expected))
            rng.restore()
        return max(errors)

    try:
        return run_isolated(original.layer, x.device, compare)
    except (TypeError, RuntimeError, ValueError):
        return float("inf")
