"""A layer with its original forward, and its two residual branches: attention and feed-forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from retrograde.engine.drift import relative_error
from retrograde.engine.preserve import StateSnapshot
from retrograde.engine.rng import torch_generators

from ._returns import checked_hidden, run_isolated

Branches = Literal["auto", "split", "whole"]
INPUT = "the layer's own input"  # stands for an argument that is the input once more, as in layer(x, x, x)
REST = "*"  # the name of the positional arguments that a layer's forward has no names for

# The names that layers give to their parts, in transformers and in most people's code.
FIRST_NORMS = ("ln_1", "input_layernorm", "layernorm_before", "norm1", "ln1", "layer_norm1", "attn_norm", "norm_1")
ATTENTIONS = ("attn", "self_attn", "attention", "self_attention")
SECOND_NORMS = (
    "ln_2", "post_attention_layernorm", "layernorm_after", "norm2", "ln2", "layer_norm2", "mlp_norm", "norm_2",
)  # fmt: skip
FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "ff")


class OriginalLayer:
    """A layer with the forward that it had before the conversion.

    It looks up the layer's parts when it runs, so that parts exchanged later (by peft) are used.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.own_forward = layer.__dict__.get("forward")  # somebody exchanged it before us
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        self.takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)  # a wrapper around a layer
        if not self.names and not self.takes_any:
            raise TypeError(f"{type(layer).__name__}.forward takes no positional input, so it is not a layer.")

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The layer's input, and its other arguments by name; those without one under `REST`."""
        rest = args[max(len(self.names), 1) :]
        if rest and not self.takes_any:
            raise TypeError(
                f"{type(self.layer).__name__} was called with {len(args)} positional arguments, but its forward takes "
                f"{len(self.names)}."
            )
        names = self.names or [INPUT]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if names[0] not in named:
            raise TypeError(f"{type(self.layer).__name__} was called without its input, by position or as {names[0]}=.")
        hidden = named.pop(names[0])
        if rest:
            named[REST] = tuple(INPUT if value is hidden else value for value in rest)
        return hidden, {name: INPUT if value is hidden else value for name, value in named.items()}

    def __call__(self, x: Tensor, arguments: Mapping[str, Any]) -> Any:
        arguments = _with_input(arguments, x)
        rest = arguments.pop(REST, ())
        if rest:  # the named ones come before them, by position too
            names = self.names[1:]
            rest = (*(arguments.pop(name) for name in names), *(x if value is INPUT else value for value in rest))
        if self.own_forward is not None:
            return self.own_forward(x, *rest, **arguments)
        return type(self.layer).forward(self.layer, x, *rest, **arguments)

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
