"""The layers of a model as a reversible stack, run in their place.

NOTE [How a converted model runs]
 The model's own code stays, and so do its layers, their names and their parameters. Only the layers' `forward` is
 exchanged. The model calls its layers in a row; each but the last writes down what it was called with and
 returns a placeholder, and the last runs the stack. What is written down travels with the placeholder, not on a
 module, so that calls in several threads are independent. A placeholder holds NaN: code that reads hidden
 states between two layers gets that, and not numbers that look right. A layer that is handed anything
 but the placeholder of the layer before it refuses.
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

from retrograde._drive import FindProbe, outside_compiled_graphs
from retrograde._plan import Memory, Plan
from retrograde._sequence import ReversibleSequence

from ._find import Branches, Half, Stock, disagreement, halves_of
from ._recipes import Recipe
from ._returns import Returns, aside, hidden_of, kind_of, returned, without_writing

AGREES = 1e-5
AGREES_ROUGHLY = 3e-2  # where sums are rounded to 8 bits
WIDE = (torch.float32, torch.float64)


@dataclass
class Pending:
    """What the layers so far were called with."""

    stack: ConvertedStack
    hidden: Tensor
    calls: tuple[dict[str, Any], ...]
    tried: Tensor | None = None  # what the layers gave when they were tried, for the next one to be tried on


class ConvertedStack(ReversibleSequence):
    """The layers of a model, rewired. It has no parameters of its own: they stay where they were.

    Args:
        layers: the model's layers.
        recipe: what each layer becomes.
        memory: as in `ReversibleSequence`.
        exact: as in `ReversibleSequence`.
        branches: "auto" takes attention and feed-forward apart where a recipe needs it and they are found; "split"
            insists on it, "whole" never does.
        first: the number of the first of the layers in the model's list.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        recipe: Recipe,
        *,
        memory: Memory | Sequence[Memory] | Plan = "reverse",
        exact: bool | int = True,
        branches: Branches = "auto",
        first: int = 0,
    ) -> None:
        stocks = [Stock(layer) for layer in layers]
        halves = [halves_of(layer) for layer in layers] if recipe.halves and branches != "whole" else []
        split = [pair for pair in halves if pair is not None]
        if branches == "split" and len(split) < len(layers):
            raise ValueError(
                f"The attention and the feed-forward of {type(layers[0]).__name__} were not found by their names, or "
                f"do not hold all its parameters, or {type(recipe).__name__} does not take them apart. Use "
                "branches='whole'."
            )
        parts: list[Any] = [list(pair) for pair in split] if len(split) == len(layers) else [[s] for s in stocks]
        super().__init__(
            [recipe.block(part, i, len(layers)) for i, part in enumerate(parts)],
            split=recipe.split,
            merge=recipe.merge,
            memory=memory,
            exact=exact,
            overflow="rescale",
        )
        self.recipe = recipe
        self.stocks = stocks
        self.branches: Branches = branches
        self.route: Literal["rewired", "stock"] = "rewired"
        self.probe: FindProbe | None = None
        self.first = first
        self.checkpointed: list[nn.Module] = []  # layers whose own checkpointing was on
        self.returns: list[dict[tuple[Any, ...], Returns]] = [{} for _ in stocks]
        self._unchecked: list[tuple[Half, Half]] = split if len(split) == len(layers) else []

    @property
    def parts(self) -> str:
        """What the branches are, in words."""
        return "attention and feed-forward" if len(self._blocks()[0].each_step()) == 2 and self._splits() else "layers"

    def _splits(self) -> bool:
        return any(isinstance(getattr(s.branch, "part", None), Half) for s in self._blocks()[0].each_step())

    def install(self) -> None:
        """Put the stack in the place of the layers."""
        for i, stock in enumerate(self.stocks):
            stock.layer.__dict__["forward"] = functools.partial(_called, self, i)

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for stock in self.stocks:
            if stock.own_forward is None:
                stock.layer.__dict__.pop("forward", None)
            else:
                stock.layer.__dict__["forward"] = stock.own_forward

    @contextmanager
    def routed(self, route: Literal["rewired", "stock"]) -> Iterator[None]:
        """A context in which the layers run rewired, or as they were."""
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before

    def change(self, recipe: Recipe) -> None:
        """Go on with other values of the same recipe."""
        parts = [[step.branch.part for step in b.each_step() if hasattr(step.branch, "part")] for b in self._blocks()]
        self.recipe = recipe
        self._rebuild(parts)

    def _rebuild(self, parts: Sequence[Sequence[Any]]) -> None:
        grid: bool | int = self.exact
        if grid and (bits := self._blocks()[0].each_step()[0].coupling.bits) is not None:
            grid = bits  # perhaps a coarser one than at first
        self.blocks = nn.ModuleList(self.recipe.block(part, i, len(parts)) for i, part in enumerate(parts))
        self.blocks.train(self.training)
        for block in self._blocks():
            block.wires(self.names)
        if grid is not False:
            self.exact = grid
        self._checked = set()

    @outside_compiled_graphs
    def finish(self, pending: Pending) -> Tensor:
        """Run the stack for a model that has called all of its layers."""
        hidden, calls = pending.hidden, pending.calls
        if torch.is_grad_enabled():
            calls = tuple(self.trained_with(call) for call in calls)
        distinct: list[dict[str, Any]] = []
        which = tuple(_number(call, distinct) for call in calls)
        if self._unchecked:
            self._check_split(hidden, calls)
        context = {"calls": tuple(distinct), "which": which, "dtype": hidden.dtype}
        wide = hidden if hidden.dtype in WIDE or not self.exact else hidden.float()
        output = self(wide, **context)
        assert isinstance(output, Tensor)
        return output.to(hidden.dtype)

    def trained_with(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a layer where gradients are wanted."""
        stores = set(self.memory.memory) == {"store"}
        return _without_cache(call, self.first, filled="keep" if stores else "refuse")

    def _check_split(self, hidden: Tensor, calls: Sequence[dict[str, Any]]) -> None:
        """See once, on a real call, that the parts found by name make up each layer."""
        pairs, self._unchecked = self._unchecked, []
        precise = hidden.dtype in WIDE and not torch.is_autocast_enabled(hidden.device.type)
        for i, (stock, pair) in enumerate(zip(self.stocks, pairs, strict=True)):
            error = disagreement(stock, pair, hidden, _without_cache(calls[i], self.first, filled="drop"))
            if not error <= (AGREES if precise else AGREES_ROUGHLY):
                break
        else:
            return
        message = (
            f"The parts of {type(stock.layer).__name__} found by their names ({pair[0].body}, {pair[1].body}) "
            f"do not make up the layer: one after the other they differ from it by {error:.2g} in layer {i}."
        )
        if self.branches == "split":
            raise ValueError(f"{message} Use branches='whole'.")
        warnings.warn(f"{message} Each layer is taken as a whole. branches='whole' says so.", stacklevel=7)
        self._rebuild([[stock] for stock in self.stocks])

    def _guarded(self, plan: Plan, running: list[int]) -> FindProbe | None:
        return self.probe if self.probe is not None else super()._guarded(plan, running)


def _called(stack: ConvertedStack, index: int, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a converted layer. See NOTE [How a converted model runs]."""
    stock = stack.stocks[index]
    hidden, arguments = stock.arguments(args, kwargs)
    if stack.route == "stock" or not stack.recipe.rewires(stock.layer.training):
        return stock(hidden, arguments)
    _refuse_sharded(stock.layer)
    pending = Pending(stack, hidden, (arguments,))
    if index:
        before = getattr(hidden, "retrograde_pending", None)
        if before is None or before.stack is not stack or len(before.calls) != index:
            raise RuntimeError(
                f"Layer {index} of a converted model was not handed what layer {index - 1} returned. The layers of a "
                "converted list are called one after the other with nothing in between: no layer is left out, "
                "repeated, or wrapped in a checkpoint, and no hook changes what it returns. (Where torch.compile "
                "traces the model and its layers return tuples, call it once without.)"
            )
        pending = Pending(stack, before.hidden, (*before.calls, arguments), before.tried)
    returns = _returns(stack, index, pending)
    if index + 1 == len(stack.stocks):
        return returns.around(stack.finish(pending), arguments)
    placeholder = pending.hidden.detach().new_full((), float("nan")).expand(pending.hidden.shape)
    placeholder.retrograde_pending = pending  # type: ignore[attr-defined]
    return returns.around(placeholder, arguments)


def _returns(stack: ConvertedStack, index: int, pending: Pending) -> Returns:
    """What a layer returns when it is called so. See NOTE [What a layer returns beside its hidden states]."""
    stock, arguments = stack.stocks[index], pending.calls[-1]
    unknown = [n for n, v in arguments.items() if hasattr(v, "retrograde_unknown") or hasattr(v, "retrograde_pending")]
    if unknown:
        raise ValueError(
            f"Layer {index} of a converted model was given as {unknown[0]} what a layer before it returned, beside the "
            "hidden states it works on. That is not known before the last layer is called. If only the first layer "
            "computes it, leave that one as it is: layers='name.of.list[1:]'."
        )
    known, kind = stack.returns[index], kind_of(arguments, stock.layer.training)
    if kind not in known:
        if torch.compiler.is_compiling():
            return Returns()
        x = pending.hidden if pending.tried is None else pending.tried
        given = without_writing(stack.trained_with(arguments) if torch.is_grad_enabled() else arguments)
        output = aside(stock.layer, x.device, lambda: stock(x, given))
        known[kind] = returned(stock.layer, output, x, given)
        pending.tried = hidden_of(output)
    return known[kind]


def _refuse_sharded(layer: nn.Module) -> None:
    """Raise for a layer that FSDP2 gathers for its own call, which ends before the stack runs it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(layer, fsdp.FSDPModule):
        raise RuntimeError(
            f"{type(layer).__name__} was given to fully_shard by itself, and is a layer of a converted model: its "
            "parameters are gathered while it is called, but it runs after that, when the last layer is called. "
            "Shard its parts (normalisations, attention, feed-forward) one by one and then the model, or the model "
            "alone."
        )


def _number(call: dict[str, Any], distinct: list[dict[str, Any]]) -> int:
    """The place of a call among the distinct ones, to which it is added if it is new."""
    for i, seen in enumerate(distinct):
        if seen.keys() == call.keys() and all(seen[name] is call[name] for name in call):
            return i
    distinct.append(call)
    return len(distinct) - 1


def _without_cache(call: Mapping[str, Any], first: int, *, filled: Literal["keep", "drop", "refuse"]) -> dict[str, Any]:
    """The arguments without an empty key-value cache, which a branch that runs twice would write into twice.

    In all memory modes alike: keys that go through a cache are laid out otherwise, and give other bits. Layers before
    the `first` may have written into it.
    """
    caches = {name: value for name, value in call.items() if hasattr(value, "get_seq_length")}
    for name, cache in list(caches.items()):
        if not (held := _held(cache, first)) or filled == "drop":
            continue
        if filled == "refuse":
            raise ValueError(
                f"{name} holds {held}, and gradients are wanted. The backward pass runs each layer "
                "again, which would write to the cache twice: use torch.no_grad(), or memory='store'."
            )
        del caches[name]
    without = {**call, **dict.fromkeys(caches)}
    return {**without, "use_cache": False} if caches and "use_cache" in call else without


def _held(cache: Any, first: int) -> str:
    """What a cache holds for the first layer, in words; none if it is empty."""
    try:
        positions = int(cache.get_seq_length(first) if first else cache.get_seq_length())
    except ValueError:  # a cache of recurrent states, which have no positions
        return "earlier states" if cache.has_previous_state() else ""
    return f"{positions} positions" if positions else ""
