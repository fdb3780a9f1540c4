"""Where in a model the layers in a row are, and what a layer's two residual branches are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from retrograde._randomness import everyday, read, write

from ._returns import aside, check_hidden, hidden_of

Branches = Literal["auto", "split", "whole"]
INPUT = "the layer's own input"  # in the place of an argument that is it once more, as in layer(x, x, x)

# The names that layers give to their parts, in transformers and in the code of most people.
FIRST_NORMS = ("ln_1", "input_layernorm", "layernorm_before", "norm1", "ln1", "layer_norm1", "attn_norm", "norm_1")
ATTENTIONS = ("attn", "self_attn", "attention", "self_attention")
SECOND_NORMS = (
    "ln_2", "post_attention_layernorm", "layernorm_after", "norm2", "ln2", "layer_norm2", "mlp_norm", "norm_2",
)  # fmt: skip
FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "ff")


def find_layers(model: nn.Module, path: str | None) -> tuple[str, list[nn.Module]]:
    """The list of layers and its name: the one named, or the only one that may be meant."""
    if path is not None:
        return path, _named(model, path)
    lists = list(_lists(model))
    if len(lists) == 1:
        return lists[0][0], list(lists[0][1])
    others = [name for name, _ in _lists(model, classes="several")]
    raise ValueError(
        f"{type(model).__name__} has {'no' if not lists else len(lists)} lists of two or more layers of one class"
        + (f": {', '.join(repr(name) for name, _ in lists)}. " if lists else ". ")
        + (f"Lists of several classes: {', '.join(map(repr, others))}. " if others else "")
        + "Name the nn.ModuleList to convert, as in layers='transformer.h'; call convert once for each."
    )


def list_name(path: str) -> str:
    """The name of the list in "encoder.block[1:]", of which some layers are meant."""
    return path.partition("[")[0]


def first_number(path: str) -> int:
    """The number of the first layer that is meant: 1 in "encoder.block[1:]"."""
    start = path.partition("[")[2].partition(":")[0]
    return int(start) if start else 0


def _named(model: nn.Module, path: str) -> list[nn.Module]:
    """The layers of the list of a name, or those of them that "[1:]" after it says."""
    name, bounds = list_name(path), re.fullmatch(r"[^\[]*(?:\[(\d*):(\d*)\])?", path)
    try:
        found: nn.Module | None = model.get_submodule(name)
    except AttributeError:
        found = None
    if found is None or bounds is None:
        there = ", ".join(repr(name) for name, _ in _every_list(model))
        raise ValueError(
            f"{type(model).__name__} has no part {path!r} (layers=). Its lists are {there or 'none at all'}."
        )
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise ValueError(f"layers={path!r} is a {type(found).__name__}; name an nn.ModuleList that is not empty.")
    start, stop = (int(bound) if bound else None for bound in bounds.groups())
    layers = list(found)[start:stop]
    if not layers:
        raise ValueError(f"layers={path!r} leaves none of the {len(found)} layers of {name!r}.")
    if isinstance(layers[0], (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"layers={path!r} is a list of lists; name one of these, as in layers='{name}.0'.")
    return layers


def _every_list(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


def _lists(model: nn.Module, classes: Literal["one", "several"] = "one") -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of layers of one class, or those of several that are in none of these."""
    inside: list[str] = []
    for name, module in _every_list(model):
        if len(module) < 2 or any(name.startswith(outer) for outer in inside):
            continue
        found = "one" if len({type(m) for m in module}) == 1 else "several"
        if found == "one" or classes == "several":
            inside.append(f"{name}.")
        if found == classes:
            yield name, module


class Stock:
    """A layer as it was before conversion: `stock(x, **arguments)`.

    It looks up the layer's parts when it runs, so that parts exchanged later (by peft) are used.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.own_forward = layer.__dict__.get("forward")  # somebody exchanged it before us
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        if not self.names:
            raise TypeError(f"{type(layer).__name__}.forward takes no input by position, so that it is not a layer.")

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The layer's input, and all else it was called with by name."""
        if len(args) > len(self.names):
            raise TypeError(
                f"{type(self.layer).__name__} was called with {len(args)} values by position, but its forward names "
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
        output = self(x, arguments)
        check_hidden(self.layer, output, x)
        hidden: Tensor = hidden_of(output)
        return hidden


def _with_input(arguments: Mapping[str, Any], x: Tensor) -> dict[str, Any]:
    return {name: x if value is INPUT else value for name, value in arguments.items()}


def halves_of(layer: nn.Module) -> tuple[Half, Half] | None:
    """The attention and the feed-forward of a layer as two updates, by the names of its parts; None if not found.

    Nor are they found where the layer has parameters outside of these parts: a scale of ones would go unnoticed.
    """
    if hasattr(layer, "crossattention"):
        return None
    if all(hasattr(layer, name) for name in ("attention", "intermediate", "output")):
        halves = Half(layer, "attention", adds="itself"), Half(layer, "intermediate", after="output", adds="itself")
    else:
        names = [_first(layer, known) for known in (FIRST_NORMS, ATTENTIONS, SECOND_NORMS, FEED_FORWARDS)]
        if None in names:
            return None
        norm1, attention, norm2, feed_forward = names
        dropout = "dropout" if isinstance(getattr(layer, "dropout", None), nn.Dropout) else None
        halves = (
            Half(layer, str(attention), norm=norm1, after=dropout),
            Half(layer, str(feed_forward), norm=norm2, after=dropout),
        )
    used = {id(p) for half in halves for part in half.parts() for p in part.parameters()}
    return halves if all(id(p) in used for p in layer.parameters()) else None


def _first(layer: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(layer, name, None), nn.Module)), None)


class Half:
    """One residual branch of a layer: normalisation, attention or feed-forward, and what comes after.

    Args:
        layer: the layer, in which the parts are looked up by name when it runs.
        body: the attention or the feed-forward.
        norm: the normalisation before it.
        after: a dropout after it; or, with `adds="itself"`, what adds the residual and normalises.
        adds: "nothing" if the result is the update, "itself" if it is the new state, as in post-norm layers.
    """

    def __init__(
        self,
        layer: nn.Module,
        body: str,
        *,
        norm: str | None = None,
        after: str | None = None,
        adds: Literal["nothing", "itself"] = "nothing",
    ) -> None:
        self.layer, self.body, self.norm, self.after, self.adds = layer, body, norm, after, adds
        parameters = inspect.signature(type(getattr(layer, body)).forward).parameters.values()
        self.takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}

    def parts(self) -> list[nn.Module]:
        """The modules it runs."""
        return [getattr(self.layer, name) for name in (self.norm, self.body, self.after) if name is not None]

    def update(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        layer = self.layer
        given = {k: v for k, v in _with_input(arguments, x).items() if self.takes is None or k in self.takes}
        result = getattr(layer, self.body)(x if self.norm is None else getattr(layer, self.norm)(x), **given)
        result = result[0] if isinstance(result, tuple) else result
        after = None if self.after is None else getattr(layer, self.after)
        update: Tensor
        if self.adds == "itself":
            update = (result if after is None else after(result, x)) - x
        else:
            update = result if after is None else after(result)
        return update


def disagreement(stock: Stock, halves: tuple[Half, Half], x: Tensor, arguments: Mapping[str, Any]) -> float:
    """By how much the two halves, one after the other, differ from the layer, relatively; in training and in eval."""

    def compared() -> float:
        worst, generators = 0.0, [(generator, read(generator)) for generator in everyday([x.device])]
        for mode in (False, True):
            stock.layer.train(mode)
            expected = stock.update(x, arguments)
            _restore(generators)
            between = x + halves[0].update(x, arguments)
            found = between + halves[1].update(between, arguments)
            _restore(generators)
            worst = max(worst, float((found - expected).norm() / expected.norm().clamp_min(1e-30)))
        return worst

    try:
        return aside(stock.layer, x.device, compared)
    except (TypeError, RuntimeError, ValueError):
        return float("inf")


def _restore(generators: list[tuple[Any, Any]]) -> None:
    for generator, state in generators:
        write(generator, state)
