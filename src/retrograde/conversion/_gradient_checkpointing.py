"""The methods that switch gradient checkpointing of a model on and off, mapped to `memory`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from retrograde.memory import as_plan
from retrograde.sequence import ReversibleSequence

from ._stack import ConvertedStack

FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""What Hugging Face's packages and timm call the attribute that switches a module's own checkpointing on."""
TRANSFORMERS = ("gradient_checkpointing_enable", "gradient_checkpointing_disable")


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

    stacks_of(model)  # raises if there are none
    for name in TRANSFORMERS:
        model.__dict__[name] = functools.partial(SWITCHES[name], model)
    return model


def map_converted(model: nn.Module, stack: ConvertedStack) -> None:
    """Map the methods of every module around the converted layers.

    Checkpointing of the layers, or of the module that calls them, is switched off if it is on: it would wrap the last
    layer, and so run the stack twice.
    """
    for module, flag in _flags_of(model, [stack]):
        if getattr(module, flag) is True:
            setattr(module, flag, False)
            stack.switched_off.append((module, flag))
    for module, name in _methods_around(model, stack):
        module.__dict__[name] = functools.partial(SWITCHES[name], module)


def unmap_converted(model: nn.Module, stack: ConvertedStack) -> None:
    """Give the modules their own methods back, but for those around other converted layers, and their checkpointing."""
    for module, flag in stack.switched_off:
        setattr(module, flag, True)
    others = [other for other in _stacks_in(model) if other is not stack and isinstance(other, ConvertedStack)]
    needed = {(id(module), name) for other in others for module, name in _methods_around(model, other)}
    for module, name in _methods_around(model, stack):
        if (id(module), name) not in needed:
            module.__dict__.pop(name, None)


def _methods_around(model: nn.Module, stack: ConvertedStack) -> Iterator[tuple[nn.Module, str]]:
    first = stack.originals[0].layer
    for module in model.modules():
        names = [name for name in SWITCHES if hasattr(type(module), name)]
        if names and any(inner is first for inner in module.modules()):
            yield from ((module, name) for name in names)


def _stacks_in(model: nn.Module) -> list[ReversibleSequence]:
    return [module for module in model.modules() if isinstance(module, ReversibleSequence)]


def _flags_of(model: nn.Module, stacks: Sequence[ReversibleSequence]) -> Iterator[tuple[nn.Module, str]]:
    """The flags of converted layers and of the modules that call them."""
    converted = [stack for stack in stacks if isinstance(stack, ConvertedStack)]
    owners = [module for module in model.modules() if any(child in converted for child in module.children())]
    layers = [original.layer for stack in converted for original in stack.originals]
    for module in dict.fromkeys([*owners, *(inner for layer in layers for inner in layer.modules())]):
        yield from ((module, flag) for flag in FLAGS if hasattr(module, flag))


def _has_other_layers(model: nn.Module, stacks: Sequence[ReversibleSequence]) -> bool:
    """Whether modules have checkpointing of their own that are neither converted layers nor around them."""
    layers = [o.layer for stack in stacks if isinstance(stack, ConvertedStack) for o in stack.originals]
    inside = {id(inner) for layer in layers for inner in layer.modules()}
    return any(
        hasattr(module, flag)
        for module in model.modules()
        if id(module) not in inside and not any(id(part) in inside for part in module.modules())
        for flag in FLAGS
    )


def _set(module: nn.Module, method: str, memory: Any, every: int, *args: Any, **kwargs: Any) -> None:
    """Set the memory of all stacks in a module, and call its own method for layers that were not converted."""
    stacks = _stacks_in(module)
    plans = []
    for stack in stacks:
        plan = as_plan(memory, list(stack))
        modes = tuple(mode if i % every == 0 else "store" for i, mode in enumerate(plan.memory))
        plans.append(replace(plan, memory=modes))
    for stack, plan in zip(stacks, plans, strict=True):
        stack.memory = plan
    own = getattr(type(module), method, None)
    if own is not None and _has_other_layers(module, stacks):
        own(module, *args, **kwargs)
        for inner, flag in _flags_of(module, stacks):
            setattr(inner, flag, False)


def _enable(
    module: nn.Module,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    """transformers: every n-th block gets the memory that is asked for; the others store."""
    options = dict(gradient_checkpointing_kwargs or {})
    memory = options.pop("memory", "offload" if offload else "reverse")
    given: dict[str, Any] = {"every_n_layers": every_n_layers, "offload": offload}
    given = {name: value for name, value in given.items() if value != {"every_n_layers": 1, "offload": False}[name]}
    _set(module, "gradient_checkpointing_enable", memory, every_n_layers, options or None, **given)


def _disable(module: nn.Module) -> None:
    """transformers."""
    _set(module, "gradient_checkpointing_disable", "store", 1)


def _enable_for_diffusers(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    _set(module, "enable_gradient_checkpointing", "reverse", 1, *args, **kwargs)


def _disable_for_diffusers(module: nn.Module) -> None:
    _set(module, "disable_gradient_checkpointing", "store", 1)


def _set_for_timm(module: nn.Module, enable: bool = True) -> None:
    _set(module, "set_grad_checkpointing", "reverse" if enable else "store", 1, enable)


SWITCHES: dict[str, Callable[..., None]] = {
    "gradient_checkpointing_enable": _enable,
    "gradient_checkpointing_disable": _disable,
    "enable_gradient_checkpointing": _enable_for_diffusers,
    "disable_gradient_checkpointing": _disable_for_diffusers,
    "set_grad_checkpointing": _set_for_timm,
}
