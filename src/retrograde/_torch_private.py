"""The private parts of torch that retrograde touches, all of them, as read in torch 2.13.

Each has no public equivalent. Nothing else in the package names an underscore of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.utils import _pytree

tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_map = _pytree.tree_map
register_pytree_node = _pytree.register_pytree_node

Method = TypeVar("Method", bound=Callable[..., Any])

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""Public, but not there before torch 2.7."""

set_grad_enabled = torch._C._set_grad_enabled
"""Sets the grad mode without a context manager's cost, which a tiny branch would feel."""


def inside_function_transform() -> bool:
    """Whether torch.func (grad, vmap …) or forward-mode AD is transforming this code.

    torch.func forbids saved-tensor hooks, and a tensor that is rebuilt has no tangent.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def without_transforms(tensor: Tensor) -> Tensor:
    """The values of a tensor that torch.func has wrapped (of all entries, under vmap)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextmanager
def outside_function_transforms() -> Iterator[None]:
    """A context in which no transform is active, for a replay that a batched backward asks for."""
    levels = torch._C._vmapmode_increment_nesting()
    for _ in range(levels):
        torch._C._vmapmode_decrement_nesting()
    try:
        with pyfunctorch.temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()


def keeps_graph() -> bool:
    """Whether the backward pass under way keeps its graph for another one; True if none is under way."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def version(tensor: Tensor | None) -> int:
    """The counter that autograd raises with every in-place edit; constant for inference tensors and for None."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # an inference tensor among them, which tracks no version
        return [version(t) for t in tensors]


Place = tuple[dict[str, Any], str]


BATCH_STATISTICS = ("running_mean", "running_var")


def _may_hide_edits(name: str, buffer: Tensor | None) -> bool:
    """Whether an edit may leave the version as it is: batch normalisation edits its statistics so, and `.data` does.

    Statistics are small, whatever their names. A large buffer is not worth a copy in every call, nor one on
    an accelerator, which would have to wait for the comparison.
    """
    if buffer is None or not buffer.is_floating_point():
        return False
    return name in BATCH_STATISTICS or (buffer.device.type == "cpu" and buffer.numel() <= 4096)


class Survey:
    """Every module below some roots, with the places of its submodules, parameters and buffers, as they are now.

    A place is the dictionary that a module looks something up in, and the name there; it is
    what `functional_call`, FSDP and users write into. A survey is needed once a step, and made anew
    only if `holds` finds that something has changed.
    """

    __slots__ = ("_slots", "buffers", "held", "modules", "places", "tensors", "training")

    def __init__(self, roots: list[nn.Module]) -> None:
        modules = self.modules = roots
        places: list[Place] = []
        held: list[Any] = []
        tensors: list[Tensor] = []
        buffers: list[tuple[dict[str, Any], str, bool]] = []  # the flag: may be edited without a new version
        training: list[bool] = []
        self._slots: list[tuple[dict[str, Any], str, dict[str, Any], int]] = []
        for module in modules:  # the list grows as it is walked
            parts = module.__dict__
            flag = module.training  # a property of the modules that torch.compile makes
            training.append(flag)
            for kind in ("_modules", "_parameters", "_buffers"):
                self._slots.append((parts, kind, parts[kind], len(parts[kind])))
            if slots := parts["_modules"]:
                for name, inner in slots.items():
                    if inner is not None:
                        modules.append(inner)
                        places.append((slots, name))
                        held.append(inner)
            if slots := parts["_parameters"]:
                for name, parameter in slots.items():
                    if parameter is not None:
                        tensors.append(parameter)
                        places.append((slots, name))
                        held.append(parameter)
            if slots := parts["_buffers"]:
                buffers.extend([(slots, name, flag and _may_hide_edits(name, slots[name])) for name in slots])
        self.places = places
        self.held = held
        self.tensors = tensors
        self.buffers = buffers
        self.training = training

    def holds(self) -> bool:
        """Whether a survey made now would find the same."""
        for parts, kind, slots, size in self._slots:
            if parts[kind] is not slots or len(slots) != size:
                return False
        return self.finds_same() and [m.training for m in self.modules] == self.training

    def finds_same(self) -> bool:
        """Whether every place holds what it held."""
        for (slots, name), thing in zip(self.places, self.held, strict=True):  # noqa: SIM110 - `all` takes twice as long
            if slots.get(name) is not thing:
                return False
        return True


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or differentiating it, does more than its forward says."""
    return has_forward_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def saved_tensor_hooks_active() -> bool:
    """Whether a tape, a checkpoint or a user's hooks are around this code; True where an old torch does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Raise when the graph that this is traced into runs and the condition does not hold."""
    torch._assert_async(condition, message)


def constant_when_traced(method: Method) -> Method:
    """Have a compiler run the method while it traces, and take its result for a constant.

    What `torch.compiler.assume_constant_result` does, without loading the compiler.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than calling its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)
