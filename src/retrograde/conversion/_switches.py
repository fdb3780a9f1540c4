"""`gradient_checkpointing_enable` and its kin, mapped to `memory`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from retrograde._plan import Memory
from retrograde._sequence import ReversibleSequence

from ._stack import ConvertedStack

FLAG = "gradient_checkpointing"
SWITCHES = ("gradient_checkpointing_enable", "gradient_checkpointing_disable")


def add_switches(model: nn.Module) -> nn.Module:
    """Have the `gradient_checkpointing_enable` and `_disable` of a model set the `memory` of its stacks.

    Trainers call them (`TrainingArguments(gradient_checkpointing=True)`). Enabling means "reverse", or what
    `gradient_checkpointing_kwargs={"memory": "checkpoint"}` says; disabling means "store". A model that was converted
    has them already.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.conversion import add_switches
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> model = add_switches(torch.nn.Sequential(torch.nn.Linear(3, 8), stack))
        >>> model.gradient_checkpointing_disable()
        >>> print(stack.memory)
        blocks 0-3 store
    """
    stacks = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no retrograde.ReversibleSequence whose memory could be switched.")
    _connect(model, stacks)
    return model


def connect(model: nn.Module, stack: ConvertedStack) -> None:
    """Have the switches of every module around converted layers set the stack's memory.

    Checkpointing that is on would wrap the last layer, and so run the whole stack once more: it is switched off.
    """
    for stock in stack.stocks:
        if stock.layer.__dict__.get(FLAG) is True:
            setattr(stock.layer, FLAG, False)
            stack.checkpointed.append(stock.layer)
    for module in _owners(model, stack):
        _connect(module, [stack])


def disconnect(model: nn.Module, stack: ConvertedStack) -> None:
    """Give the modules their own switches back."""
    for layer in stack.checkpointed:
        setattr(layer, FLAG, True)
    for module in _owners(model, stack):
        for name in SWITCHES:
            module.__dict__.pop(name, None)


def _connect(module: nn.Module, stacks: Sequence[ReversibleSequence]) -> None:
    module.__dict__[SWITCHES[0]] = functools.partial(_enable, tuple(stacks))
    module.__dict__[SWITCHES[1]] = functools.partial(_disable, tuple(stacks))


def _owners(model: nn.Module, stack: ConvertedStack) -> list[nn.Module]:
    first = stack.stocks[0].layer
    return [
        module
        for module in model.modules()
        if hasattr(type(module), SWITCHES[0]) and any(inner is first for inner in module.modules())
    ]


def _enable(
    stacks: Sequence[ReversibleSequence],
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    """Reverse, or as the arguments say: of every n layers one only, the others store."""
    options = dict(gradient_checkpointing_kwargs or {})
    memory = cast("Memory", options.get("memory", "offload" if offload else "reverse"))
    for stack in stacks:
        stack.memory = [memory if i % every_n_layers == 0 else "store" for i in range(len(stack.blocks))]


def _disable(stacks: Sequence[ReversibleSequence]) -> None:
    for stack in stacks:
        stack.memory = "store"
