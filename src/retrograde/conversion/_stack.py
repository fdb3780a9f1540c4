"""The layers of a model as a stack, which runs in their place.

NOTE [How a converted model runs]
 The model's own code stays, and so do its layers, their names and their parameters. Only the `forward` of the layers
 is replaced. The model calls its layers in a row; each except the last records the arguments of its call and
 returns a placeholder, and the last one runs the stack. The record travels with the placeholder, not on a
 module, so that calls in several threads are independent. A placeholder has no values: code that reads hidden
 states between two layers gets an error. So does a layer whose input is not the placeholder of the layer before it.

 The recipe "unchanged" needs no inverse, and so nothing of the layers after a layer: each runs when it is called, under
 a tape of its own (see `_layer_run.py`). Only when a tool observes the stack do its layers run as one.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.engine.exactness import make_exact
from retrograde.engine.fake_internals import has_values
from retrograde.engine.graph_marks import is_traced
from retrograde.engine.run import outside_compiled_graphs
from retrograde.memory import Memory
from retrograde.sequence import ReversibleSequence

from ._caches import refuse_filled_caches, with_copied_caches, without_cache
from ._find import LayerList
from ._layer_run import check_not_partitioned, run_layer
from ._layers import Branches, OriginalLayer, Sublayer, sublayer_error, sublayers_of
from ._placeholder import placeholder
from ._recipes import Recipe
from ._returns import ReturnForm, checked_hidden, kind_of_call, return_form, run_isolated

TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 3e-2  # where sums are rounded to 8 bits
GRID_DTYPES = (torch.float32, torch.float64)


@dataclass
class Pending:
    """The calls of the layers so far, and the input of the first one."""

    stack: ConvertedStack
    hidden: Tensor
    calls: tuple[dict[str, Any], ...]
    trial_output: Tensor | None = None  # of the layer that was tried last, on which the next one is tried


class ConvertedStack(ReversibleSequence):
    """The layers of a model, rewired. It has no parameters of its own: they stay in the layers.

    Args:
        place: the model's layers, and the name of their list.
        recipe: what each layer becomes.
        memory: as in `ReversibleSequence`.
        exact: as in `ReversibleSequence`, for recipes that have an inverse.
        grid_bits: as in `ReversibleSequence`.
        branches: "auto" separates attention and feed-forward if the recipe needs it and they can be recognised;
            "split" requires it, "whole" never does.
    """

    def __init__(
        self,
        place: LayerList,
        recipe: Recipe,
        *,
        memory: Memory = "reverse",
        exact: bool = True,
        grid_bits: int | None = None,
        branches: Branches = "auto",
    ) -> None:
        layers = place.layers
        originals = [OriginalLayer(layer) for layer in layers]
        pairs = [sublayers_of(layer) for layer in layers] if recipe.uses_sublayers and branches != "whole" else [None]
        if branches == "split" and None in pairs:
            raise ValueError(
                f"The attention and the feed-forward of {type(layers[0]).__name__} cannot be separated: they were not "
                f"recognised by their names, or do not hold all its parameters, or {type(recipe).__name__} does not "
                "separate them. Use branches='whole'."
            )
        parts: list[Any] = [[layer] for layer in originals] if None in pairs else pairs
        super().__init__(
            [recipe.block(part, i, len(layers)) for i, part in enumerate(parts)],
            split=recipe.split,
            merge=recipe.merge,
            memory=memory,
            exact=exact and recipe.has_inverse,
            grid_bits=grid_bits,
            overflow="rescale",
        )
        self.place = LayerList(place.path, [])  # the layers are in `originals`
        self.recipe = recipe
        self.keeps_last_graph = recipe.has_inverse  # see `_layer_run.py`
        self.originals = originals
        self.branches: Branches = branches
        self.route: Literal["rewired", "original"] = "rewired"
        self.switched_off: list[tuple[nn.Module, str]] = []  # checkpointing flags that were on
        self.return_forms: list[dict[tuple[Any, ...], ReturnForm]] = [{} for _ in originals]
        self._is_split_checked = False

    def __repr__(self) -> str:
        return f"ConvertedStack(recipe={self.recipe}, {len(self)} layers, branches={self.parts!r}, {self.extra_repr()})"

    @property
    def parts(self) -> str:
        """What the branches are, in words."""
        return "attention and feed-forward" if isinstance(self._parts_of_blocks()[0][0], Sublayer) else "layers"

    @property
    def is_observed(self) -> bool:
        """Whether a tool looks into the calls."""
        return self._observer is not None

    @property
    def is_traced(self) -> bool:
        """Whether the layers become part of a graph that backend="retrograde" compiles."""
        return self._goes_into_graph(self.memory)

    def _parts_of_blocks(self) -> list[list[Any]]:
        """For each block its layer, or its layer's two sublayers."""
        return [[step.branch.part for step in block.each_step() if hasattr(step.branch, "part")] for block in self]

    def install(self) -> None:
        """Replace the forward of the layers."""
        for i, original in enumerate(self.originals):
            original.layer.__dict__["forward"] = functools.partial(_forward, self, i)

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for original in self.originals:
            if original.own_forward is None:
                original.layer.__dict__.pop("forward", None)
            else:
                original.layer.__dict__["forward"] = original.own_forward

    @contextmanager
    def routed(self, route: Literal["rewired", "original"]) -> Iterator[None]:
        """A context in which the layers run rewired, or with their original forward."""
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before

    def change_recipe(self, recipe: Recipe) -> None:
        """Continue with other values of the same recipe."""
        self.recipe = recipe
        self._rebuild(self._parts_of_blocks())

    def _rebuild(self, parts: Sequence[Sequence[Any]]) -> None:
        is_exact, bits = self.exact, self.grid_bits  # perhaps a coarser grid than at first
        self.blocks = nn.ModuleList(self.recipe.block(part, i, len(parts)) for i, part in enumerate(parts))
        self.blocks.train(self.training)
        for block in self:
            block.bound_steps(self.names)
        if is_exact:
            make_exact(list(self), bits)
        self._checked = set()

    def finish(self, pending: Pending) -> Tensor:
        """Run the stack for a model that has called all of its layers."""
        if is_traced() and (self._is_split_checked or self.parts == "layers"):
            return self._run_layers(pending.hidden, pending.calls)
        return self._run_outside(pending.hidden, pending.calls)

    @outside_compiled_graphs
    def _run_outside(self, hidden: Tensor, calls: tuple[dict[str, Any], ...]) -> Tensor:
        if not self._is_split_checked:
            self._check_split(hidden, calls)
            self._is_split_checked = True
        return self._run_layers(hidden, calls)

    def _run_layers(self, hidden: Tensor, calls: tuple[dict[str, Any], ...]) -> Tensor:
        if torch.is_grad_enabled():
            calls = tuple(self.training_arguments(call) for call in calls)
        distinct: list[dict[str, Any]] = []
        which = tuple(_index_among(call, distinct) for call in calls)
        context = {"calls": tuple(distinct), "which": which, "dtype": hidden.dtype}
        output = self(hidden if hidden.dtype in GRID_DTYPES or not self.exact else hidden.float(), **context)
        assert isinstance(output, Tensor)
        return output.to(hidden.dtype)

    def training_arguments(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a layer in a call with gradients."""
        stores = all(mode.make_tape is None for mode in self.memory.modes)
        if not self.recipe.has_inverse:
            if not stores:
                refuse_filled_caches(call, self.place.first)
            return dict(call)
        return without_cache(call, self.place.first, filled="keep" if stores else "refuse")

    def _check_split(self, hidden: Tensor, calls: Sequence[dict[str, Any]]) -> None:
        """Check once, on a real call, that the sublayers recognised by name make up each layer."""
        if self.parts == "layers" or not has_values(hidden):
            return
        is_precise = hidden.dtype in GRID_DTYPES and not torch.is_autocast_enabled(hidden.device.type)
        for i, (first, second) in enumerate(self._parts_of_blocks()):
            arguments = without_cache(calls[i], self.place.first, filled="drop")
            error = sublayer_error(self.originals[i], (first, second), hidden, arguments)
            if not error <= (TOLERANCE if is_precise else LOW_PRECISION_TOLERANCE):
                break
        else:
            return
        message = (
            f"The parts of {type(first.layer).__name__} recognised by their names ({first.body}, {second.body}) do not "
            f"make up the layer: run one after the other, they differ from it by {error:.2g} in layer {i}."
        )
        if self.branches == "split":
            raise ValueError(f"{message} Use branches='whole'.")
        warnings.warn(
            f"{message} Each layer becomes one branch; branches='whole' avoids this check and warning.", stacklevel=7
        )
        self._rebuild([[original] for original in self.originals])

    def check_modes(self) -> None:
        """Raise if a recipe that changes the layers in training only finds some of them in training, some in eval."""
        modes = [original.layer.training for original in self.originals]
        if self.recipe.rewires(True) == self.recipe.rewires(False) or len(set(modes)) == 1:
            return
        still = [str(self.place.first + i) for i, training in enumerate(modes) if not training]
        several = "s" if len(still) > 1 else ""
        raise RuntimeError(
            f"Of {self.place.path!r}, layer{several} {', '.join(still)} {'are' if several else 'is'} in eval mode and "
            f"the others are in training mode. {self.recipe} changes what the list computes in training and not in "
            f"eval, so all its layers must be in one mode: call {self.place.name}.train() or .eval() on the list (a "
            "dropout is switched off by its p = 0), convert only the layers that are trained "
            f"(layers='{self.place.name}[start:stop]'), or use the recipe 'unchanged'."
        )


def _forward(stack: ConvertedStack, index: int, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a converted layer. See NOTE [How a converted model runs]."""
    original = stack.originals[index]
    hidden, arguments = original.arguments(args, kwargs)
    if stack.route == "original":
        return original(hidden, arguments)
    if not stack.recipe.has_inverse and not stack.is_observed:
        return run_layer(stack, index, hidden, arguments)
    if index == 0:
        stack.check_modes()
    if not stack.recipe.rewires(original.layer.training):
        return original(hidden, arguments)
    _check_not_sharded(stack, original.layer)
    pending = Pending(stack, hidden, (arguments,))
    if index:
        before = getattr(hidden, "retrograde_pending", None)
        if before is None or before.stack is not stack or len(before.calls) != index:
            raise _not_in_a_row(index)
        pending = Pending(stack, before.hidden, (*before.calls, arguments), before.trial_output)
        before.trial_output = None  # the model still holds what has `before`
    form = _return_form(stack, index, pending)
    if index + 1 == len(stack.originals):
        pending.trial_output = None
        return form.around(stack.finish(pending), arguments)
    states = placeholder(pending.hidden, pending.hidden.shape, _why_no_states(stack, index))
    states.retrograde_pending = pending  # type: ignore[attr-defined]
    return form.around(states, arguments)


def _not_in_a_row(index: int) -> RuntimeError:
    return RuntimeError(
        f"Layer {index} of a converted model did not get what layer {index - 1} returned. The layers of a "
        "converted list must be called one after the other with nothing in between: no layer is skipped, "
        "repeated, or wrapped in a checkpoint, and no hook changes what it returns. The recipe 'unchanged' has no such "
        "limit. (If torch.compile traces the model and its layers return tuples, call the model once without it first.)"
    )


def _why_no_states(stack: ConvertedStack, index: int) -> str:
    place = stack.place
    return (
        f"The hidden states after layer {place.first + index} of {place.name!r} do not exist: the layers of a "
        "converted list run as one stack, when the last of them is called. If the model returns or reads them "
        "(output_hidden_states=True, a vision tower of which an earlier layer is read), run it under "
        "conversion.original(), in eval after the recipe 'bdia', or convert the list in two parts that end where it is "
        f"read: layers='{place.part(0, index + 1)}' and layers='{place.part(index + 1, None)}'. Code and hooks between "
        "the layers are possible with the recipe 'unchanged'."
    )


def _return_form(stack: ConvertedStack, index: int, pending: Pending) -> ReturnForm:
    """What a layer returns for this kind of call. See NOTE [What a layer returns besides its hidden states]."""
    original, arguments = stack.originals[index], pending.calls[-1]
    for name, value in arguments.items():
        if hasattr(value, "retrograde_unknown") or hasattr(value, "retrograde_pending"):
            raise ValueError(
                f"Layer {index} of a converted model got as {name} a value that an earlier layer returned, besides "
                "its hidden states. It is not known before the last layer is called. If only the first layer computes "
                "it, leave that one unconverted: layers='name.of.list[1:]'; or use the recipe 'unchanged'."
            )
    forms, kind = stack.return_forms[index], kind_of_call(arguments, original.layer.training)
    if kind not in forms:
        if torch.compiler.is_compiling():
            return ReturnForm()
        x = pending.hidden if pending.trial_output is None else pending.trial_output
        copied = with_copied_caches(stack.training_arguments(arguments) if torch.is_grad_enabled() else arguments)
        output = run_isolated(original.layer, x.device, lambda: original(x, copied))
        pending.trial_output = checked_hidden(original.layer, output, x)
        forms[kind] = return_form(original.layer, output, copied)
    return forms[kind]


def _check_not_sharded(stack: ConvertedStack, layer: nn.Module) -> None:
    """Raise for a layer whose parameters are gathered for its own call, which ends before the stack runs it."""
    check_not_partitioned(stack, layer)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(layer, fsdp.FSDPModule):
        raise RuntimeError(
            f"{type(layer).__name__} was given to fully_shard by itself, and is a layer of a converted model: its "
            "parameters are gathered while it is called, but it runs after that, when the last layer is called. "
            "Shard its parts (normalisations, attention, feed-forward) one by one and then the model, or only the "
            "model."
        )


def _index_among(call: dict[str, Any], distinct: list[dict[str, Any]]) -> int:
    """The index of a call among the distinct ones, to which it is added if it is new."""
    for i, other in enumerate(distinct):
        if other.keys() == call.keys() and all(other[name] is call[name] for name in call):
            return i
    distinct.append(call)
    return len(distinct) - 1
