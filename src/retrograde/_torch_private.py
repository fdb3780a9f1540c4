"""The private parts of torch that retrograde touches, all of them, as read in torch 2.13.

Each has no public equivalent. Nothing else in the package names an underscore of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten

set_grad_enabled = torch._C._set_grad_enabled
"""Sets the grad mode without a context manager's cost, which a tiny branch would feel."""


def inside_function_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp …) is transforming this code; it forbids saved-tensor hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def version(tensor: Tensor) -> int:
    """The counter that autograd raises with every in-place edit; constant for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # an inference tensor among them, which tracks no version
        return [version(t) for t in tensors]


Place = tuple[dict[str, Any], str]


class Survey:
    """Every module below some roots, with the places of their parameters and buffers, as they are now.

    A place is the dictionary that a module looks its tensor up in, and the name there; it is
    what `functional_call` and FSDP write into. This runs once a step, so it does without the
    generators and memo sets of `named_parameters`.
    """

    __slots__ = ("buffer_places", "modules", "parameter_places", "parameters", "training")

    def __init__(self, roots: list[nn.Module]) -> None:
        modules = self.modules = roots
        parameters: list[Tensor] = []
        parameter_places: list[Place] = []
        buffer_places: list[Place] = []
        training: list[bool] = []
        for module in modules:  # the list grows as it is walked
            parts = module.__dict__
            training.append(parts["training"])
            if inner := parts["_modules"]:
                modules.extend([m for m in inner.values() if m is not None])
            if slots := parts["_parameters"]:
                for name, parameter in slots.items():
                    if parameter is not None:
                        parameters.append(parameter)
                        parameter_places.append((slots, name))
            if slots := parts["_buffers"]:
                buffer_places.extend([(slots, name) for name, b in slots.items() if b is not None])
        self.parameters = parameters
        self.parameter_places = parameter_places
        self.buffer_places = buffer_places
        self.training = training


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than calling its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)
