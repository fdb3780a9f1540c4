"""The private parts of torch that retrograde touches, all of them, as read in torch 2.13 and run with 2.11 to 2.15.

Each has no public equivalent. Nothing else in the package names an underscore of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter, getitem, is_
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.utils import _pytree, checkpoint

tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_map = _pytree.tree_map
register_pytree_node = _pytree.register_pytree_node

Method = TypeVar("Method", bound=Callable[..., Any])


def is_exporting() -> bool:
    """Whether torch.export is at work: the flag that `torch.compiler.is_exporting` reads.

    Asked through that function, the compiler of torch 2.11 and before says that it exports whenever it traces.
    """
    return bool(torch.compiler._is_exporting_flag)


set_grad_enabled = torch._C._set_grad_enabled
"""Sets the grad mode without a context manager's cost, which a tiny branch would feel."""


push_hooks: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None]
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""What `saved_tensors_hooks` calls on entry and exit, without its three Python calls a step."""

float32_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
"""What `torch.get_float32_matmul_precision` calls."""

needs_grad = attrgetter("requires_grad")
_version = attrgetter("_version")


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
        return list(map(_version, tensors))
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


_KINDS = ("training", "_modules", "_parameters", "_buffers")


class Survey:
    """Every module below some roots, with the places of its submodules, parameters and buffers, as they are now.

    A place is the dictionary that a module looks something up in, and the name there; it is
    what `functional_call`, FSDP and users write into. A survey is needed once a step, and made anew
    only if `holds` finds that something has changed.
    """

    __slots__ = ("_flagged", "_names", "_sizes", "_slots", "_things", "_whole", "attributes", "buffers", "held",
                 "modules", "places", "requires", "tensors", "training")  # fmt: skip

    def __init__(self, roots: list[nn.Module]) -> None:
        modules = self.modules = roots
        places: list[Place] = []
        held: list[Any] = []
        tensors: list[Tensor] = []
        buffers: list[tuple[dict[str, Any], str, bool]] = []  # the flag: may be edited without a new version
        training: list[bool] = []
        seen: list[tuple[dict[str, Any], str, Any]] = []  # the places, and those of the dictionaries and flags
        for module in modules:  # the list grows as it is walked
            parts = module.__dict__
            flag = module.training
            training.append(flag)
            seen.extend([(parts, kind, parts[kind]) for kind in _KINDS if kind in parts])
            seen.extend([(parts["_modules"], *item) for item in parts["_modules"].items()])
            seen.extend([(parts["_parameters"], *item) for item in parts["_parameters"].items()])
            if slots := parts["_modules"]:
                for name, inner in slots.items():
                    places.append((slots, name))
                    held.append(inner)
                    if inner is not None:
                        modules.append(inner)
            if slots := parts["_parameters"]:
                for name, parameter in slots.items():
                    places.append((slots, name))
                    held.append(parameter)
                    if parameter is not None:
                        tensors.append(parameter)
            if slots := parts["_buffers"]:
                buffers.extend([(slots, name, flag and _may_hide_edits(name, slots[name])) for name in slots])
        self.places = places
        self.held = held
        self.tensors = tensors
        self.buffers = buffers
        self.training = training
        self._flagged = [m for m in modules if "training" not in m.__dict__]  # a property of what torch.compile makes
        self.attributes = [vars(m) for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self.requires = list(map(needs_grad, tensors))
        self._whole = [thing for _, _, thing in seen if isinstance(thing, dict)]
        self._sizes = list(map(len, self._whole))
        self._slots = [slots for slots, _, _ in seen]
        self._names = [name for _, name, _ in seen]
        self._things = [thing for _, _, thing in seen]

    def has_new_buffers(self) -> bool:
        """Whether a module has other buffers than it had, as one that a forward registers."""
        return sum(len(m._buffers) for m in self.modules) != len(self.buffers)

    def holds(self) -> bool:
        """Whether a survey made now would find the same. It is asked twice a step: no Python runs for a place."""
        try:
            same = all(map(is_, map(getitem, self._slots, self._names), self._things))
        except KeyError:
            return False
        return (
            same
            and list(map(len, self._whole)) == self._sizes
            and list(map(needs_grad, self.tensors)) == self.requires
            and (not self._flagged or [m.training for m in self.modules] == self.training)
        )


class _Kept(dict[Any, Any]):
    """What a selective checkpoint kept, by operator; of any other operator it says to run it."""

    def __init__(self, kept: dict[Any, Any], runs: object) -> None:
        super().__init__(kept)
        self._others = _Others(runs)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, self._others)


class _Others:
    def __init__(self, runs: object) -> None:
        self._runs = runs

    def get(self, index: int) -> object:
        return self._runs


def let_others_run(replay: Any) -> None:
    """Have the replay of a selective checkpoint run operators of which nothing was kept as often as it likes.

    torch counts all of them. But a cast of a weight that autocast remembered from before is not seen in the first run.
    """
    runs, storage = getattr(checkpoint, "_RECOMPUTE", None), getattr(replay, "storage", None)
    if runs is not None and isinstance(storage, dict):
        kept = {key: each for key, each in storage.items() if any(entry is not runs for entry in each.values())}
        replay.storage = _Kept(kept, runs)


def left_over(replay: Any) -> bool:
    """Whether the replay of a selective checkpoint left results that were kept: it took those of others, then."""
    stored = getattr(replay, "storage", {}).values()
    entries = [entry for each in stored for entry in (each.values() if isinstance(each, dict) else each)]
    return any(hasattr(leaf, "val") for leaf in tree_flatten(entries)[0])


def refresh_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Have recurrent modules read the weights in their places: they hold a list of them besides."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


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


def never_compiled(factory: Method) -> Method:
    """Have the compiler leave the functions alone that a factory makes.

    A hook of ours that runs inside a compiled region would be compiled itself, anew for every tensor. What
    `torch.compiler.disable` does, without loading the compiler, or a wrapper in every call.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        for constant in factory.__code__.co_consts:
            if isinstance(constant, CodeType):
                frames.set_code_exec_strategy(constant, skip)
    return factory


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than calling its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def is_called_plainly(module: nn.Module) -> bool:
    """Whether neither hooks of the module nor a function transform are at work here."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )
