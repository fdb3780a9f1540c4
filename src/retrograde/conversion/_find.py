"""Where in a model the layers in a row are, and what a layer's two residual branches are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde._randomness import everyday, read, write

Branches = Literal["auto", "split", "whole"]

# The names that layers give to their parts, in transformers and in the code of most people.
FIRST_NORMS = ("ln_1", "input_layernorm", "layernorm_before", "norm1", "ln1", "layer_norm1", "attn_norm", "norm_1")
ATTENTIONS = ("attn", "self_attn", "attention", "self_attention")
SECOND_NORMS = (
    "ln_2", "post_attention_layernorm", "layernorm_after", "norm2", "ln2", "layer_norm2", "mlp_norm", "norm_2",
)  # fmt: skip
FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "ff")


def find_layers(model: nn.Module, path: str | None) -> tuple[str, nn.ModuleList]:
    """The list of layers and its name: the one named, or the only one that may be meant."""
    if path is not None:
        try:
            found: nn.Module | None = model.get_submodule(path)
        except AttributeError:
            found = None
        if found is None:
            there = ", ".join(repr(name) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
            raise ValueError(
                f"{type(model).__name__} has no part {path!r} (layers=). Its lists are {there or 'none at all'}."
            )
        if not isinstance(found, nn.ModuleList) or not len(found):
            raise ValueError(f"layers={path!r} is a {type(found).__name__}; name an nn.ModuleList that is not empty.")
        return path, found
    lists = list(_lists(model))
    if len(lists) == 1:
        return lists[0]
    raise ValueError(
        f"{type(model).__name__} has {'no' if not lists else len(lists)} lists of two or more layers of one class"
        + (f": {', '.join(repr(name) for name, _ in lists)}. " if lists else ". ")
        + "Name the nn.ModuleList to convert, as in layers='transformer.h'; call convert once for each."
    )


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of layers of one class."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(m) for m in module}) == 1:
            inside.append(f"{name}.")
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
        return named.pop(self.names[0]), named

    def __call__(self, x: Tensor, arguments: Mapping[str, Any]) -> Any:
        if self.own_forward is not None:
            return self.own_forward(x, **arguments)
        return type(self.layer).forward(self.layer, x, **arguments)

    def update(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """The layer's output, which must be one tensor."""
        output = self(x, arguments)
        if isinstance(output, Tensor):
            return output
        raise TypeError(
            f"{type(self.layer).__name__} returned a {type(output).__name__}, but a layer that is converted returns "
            "its new hidden states alone. Wrap it, or use a version of its library whose layers return a tensor."
        )


def halves_of(layer: nn.Module) -> tuple[Half, Half] | None:
    """The attention and the feed-forward of a layer as two updates, by the names of its parts; None if not found."""
    if hasattr(layer, "crossattention"):
        return None
    if all(hasattr(layer, name) for name in ("attention", "intermediate", "output")):
        return Half(layer, "attention", adds="itself"), Half(layer, "intermediate", after="output", adds="itself")
    names = [_first(layer, known) for known in (FIRST_NORMS, ATTENTIONS, SECOND_NORMS, FEED_FORWARDS)]
    if None in names:
        return None
    norm1, attention, norm2, feed_forward = names
    dropout = "dropout" if isinstance(getattr(layer, "dropout", None), nn.Dropout) else None
    return (
        Half(layer, str(attention), norm=norm1, after=dropout),
        Half(layer, str(feed_forward), norm=norm2, after=dropout),
    )


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

    def update(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        layer = self.layer
        given = arguments if self.takes is None else {k: v for k, v in arguments.items() if k in self.takes}
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
    layer, worst = stock.layer, 0.0
    flags = [(module, module.training) for module in layer.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    generators = [(generator, read(generator)) for generator in everyday([x.device])]
    try:
        for mode in (False, True):
            layer.train(mode)
            with torch.no_grad():
                expected = stock.update(x, arguments)
                _restore(generators)
                between = x + halves[0].update(x, arguments)
                found = between + halves[1].update(between, arguments)
                _restore(generators)
            worst = max(worst, float((found - expected).norm() / expected.norm().clamp_min(1e-30)))
    except (TypeError, RuntimeError, ValueError):
        return float("inf")
    finally:
        _restore(generators)
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return worst


def _restore(generators: list[tuple[Any, Any]]) -> None:
    for generator, state in generators:
        write(generator, state)
