"""`gradient_checkpointing_enable` and `gradient_checkpointing_disable` of a model, mapped to `memory`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from retrograde.memory import as_plan
from retrograde.sequence import ReversibleSequence

from ._stack import ConvertedStack

FLAG = "gradient_checkpointing"
ENABLE, DISABLE = "gradient_checkpointing_enable", "gradient_checkpointing_disable"


def map_gradient_checkpointing(model: nn.Module) -> nn.Module:
    """Make `gradient_checkpointing_enable` and `_disable` of a model set the `memory` of its stacks.

    Trainers call these methods (`TrainingArguments(gradient_checkpointing=True)`). Enabling sets memory="reverse", or
    the mode in `gradient_checkpointing_kwargs={"memory": "checkpoint"}`; blocks without an inverse are checkpointed.
    Disabling sets "store". A converted model has these methods already.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.conversion import map_gradient_checkpointing
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> model = map_gradient_checkpointing(torch.nn.Sequential(torch.nn.Linear(3, 8), stack))
        >>> model.gradient_checkpointing_disable()
        >>> print(stack.memory)
        blocks 0-3 store
    """
    from retrograde.measure.stacks import stacks_of  # here, so that `import retrograde` loads no measuring tool

    _map(model, list(stacks_of(model).values()))
    return model


def map_converted(model: nn.Module, stack: ConvertedStack) -> None:
    """Map the methods of every module around the converted layers.

    Layers whose own checkpointing is on are switched off: it would wrap the last layer, and so run the stack twice.
    """
    for original in stack.originals:
        if original.layer.__dict__.get(FLAG) is True:
            setattr(original.layer, FLAG, False)
            stack.checkpointed.append(original.layer)
    for module in _modules_around(model, stack):
        _map(module, [stack])


def unmap_converted(model: nn.Module, stack: ConvertedStack) -> None:
    """Give the modules their own methods back, and the layers their checkpointing."""
    for layer in stack.checkpointed:
        setattr(layer, FLAG, True)
    for module in _modules_around(model, stack):
        module.__dict__.pop(ENABLE, None)
        module.__dict__.pop(DISABLE, None)


def _map(module: nn.Module, stacks: Sequence[ReversibleSequence]) -> None:
    module.__dict__[ENABLE] = functools.partial(_enable, tuple(stacks))
    module.__dict__[DISABLE] = functools.partial(_enable, tuple(stacks), {"memory": "store"})


def _modules_around(model: nn.Module, stack: ConvertedStack) -> list[nn.Module]:
    first = stack.originals[0].layer
    return [
        module
        for module in model.modules()
        if hasattr(type(module), ENABLE) and any(inner is first for inner in module.modules())
    ]


def _enable(
    stacks: Sequence[ReversibleSequence],
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    """Set the memory that the arguments ask for in every n-th block; the others store."""
    memory = (gradient_checkpointing_kwargs or {}).get("memory", "offload" if offload else "reverse")
    for stack in stacks:
        plan = as_plan(memory, list(stack))
        modes = tuple(mode if i % every_n_layers == 0 else "store" for i, mode in enumerate(plan.memory))
        stack.memory = replace(plan, memory=modes)
