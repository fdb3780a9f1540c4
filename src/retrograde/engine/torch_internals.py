"""The private parts of torch that retrograde touches, as read in torch 2.13 and run with 2.9 to 2.15.

Each has no public equivalent. Those for tensors without values are in `fake_internals.py`, those of the compiler in
`compiled/compiler_internals.py`; nothing else in the package names an underscore of torch.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
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
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def constant_when_traced(method: Method) -> Method:
    """Have a compiler run the method while it traces, and take its result for a constant.

    What `torch.compiler.assume_constant_result` does, without loading the compiler.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


set_grad_enabled = torch._C._set_grad_enabled
"""Sets the grad mode without a context manager's cost, which a tiny branch would feel."""


push_hooks: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None]
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""What `saved_tensors_hooks` calls on entry and exit, without its three Python calls per step."""

_PRECISIONS = [("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))]


def float32_precision() -> tuple[str | None, ...]:
    """How float32 products are computed: what `set_float32_matmul_precision` set, then each `fp32_precision`.

    The first is None where a program uses both: torch then raises when it is asked for it.
    """
    try:
        legacy = torch._C._get_float32_matmul_precision()
    except RuntimeError:
        legacy = None
    return legacy, *(torch._C._get_fp32_precision_getter(*each) for each in _PRECISIONS)


def set_float32_precision(wanted: Sequence[str | None]) -> None:
    """Set what `float32_precision` returned; only what differs, so that a program that uses one way still does."""
    legacy = wanted[0]
    if legacy is not None and float32_precision()[0] != legacy:
        torch._C._set_float32_matmul_precision(legacy)
    for place, value in zip(_PRECISIONS, wanted[1:], strict=True):
        if value is not None and torch._C._get_fp32_precision_getter(*place) != value:
            torch._C._set_fp32_precision_setter(*place, value)


def inherited_list(name: str) -> list[Any]:
    """A list of this thread. A thread of autograd's, which runs a backward pass, starts with a copy of its caller's.

    On an accelerator a backward pass runs in a thread of autograd's, where `threading.local` finds nothing; what is
    stashed here torch hands on to that thread.
    """
    key, thread = f"retrograde.{name}", threading.get_ident()
    stashed: tuple[int, list[Any]] = torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else (0, [])
    owner, values = stashed
    if owner != thread:
        values = list(values)
        torch._C._stash_obj_in_tls(key, (thread, values))
    return values


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass under way on this thread; -1 if none is."""


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


number_of_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of a graph on this thread gets: the same for all tensors that one operator saves."""


def is_of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, which `_base` is."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether the user hooked the gradient of a tensor, which `torch.autograd.grad` to it would call too."""
    return bool(tensor._backward_hooks)


def parameter_slots(module: nn.Module) -> dict[str, Any]:
    """Where a module holds its own parameters, to exchange them for one run as `functional_call` does."""
    return module._parameters


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward pass under way keeps its graph for another one; True if none is under way."""


def cached_parametrizations() -> dict[Any, Tensor | None] | None:
    """What `torch.nn.utils.parametrize.cached()` has computed so far; None outside of it."""
    return parametrize._cache if parametrize._cache_enabled else None


@contextmanager
def parametrizations_cached(cache: dict[Any, Tensor | None] | None) -> Iterator[None]:
    """A context in which parametrizations are cached, with these computed already; or are not cached, if None."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = int(cache is not None), dict(cache or {})
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


class _SavedResults(dict[Any, Any]):
    """What a selective checkpoint saved, by operator; of any other operator it says to run it."""

    def __init__(self, saved: dict[Any, Any], runs: object) -> None:
        super().__init__(saved)
        self._others = _Others(runs)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, self._others)


class _Others:
    def __init__(self, runs: object) -> None:
        self._runs = runs

    def get(self, index: int) -> object:
        return self._runs


def let_others_run(replay: Any) -> None:
    """Let the replay of a selective checkpoint run operators of which nothing was saved as often as it likes.

    torch counts all of them. But a cast of a weight that autocast remembered from before is not seen in the first run.
    """
    runs, storage = getattr(checkpoint, "_RECOMPUTE", None), getattr(replay, "storage", None)
    if runs is not None and isinstance(storage, dict):
        saved = {key: each for key, each in storage.items() if any(entry is not runs for entry in each.values())}
        replay.storage = _SavedResults(saved, runs)


def results_left_over(replay: Any) -> bool:
    """Whether the replay of a selective checkpoint left saved results unused: then it ran fewer operators."""
    stored = getattr(replay, "storage", {}).values()
    entries = [entry for each in stored for entry in (each.values() if isinstance(each, dict) else each)]
    return any(hasattr(leaf, "val") for leaf in tree_flatten(entries)[0])


TELLS_RESULTS = "op_output" in checkpoint.SelectiveCheckpointContext.__init__.__code__.co_varnames
"""Whether a selective checkpoint tells its policy an operator's result. torch 2.9 does not: then nothing is saved."""


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or differentiating it, does more than its forward says."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""Of torch, for what differs between versions and cannot be asked in another way."""


def casts_inputs_once(module: nn.Module) -> bool:
    """Whether FSDP2 casts the module's inputs in the forward pass, and not when it runs again in the backward pass.

    Before torch 2.13 it takes any call in the backward pass for one whose inputs were cast already.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if VERSION >= (2, 13) or fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return False
    policy = module._get_fsdp_state()._mp_policy
    return bool(policy.cast_forward_inputs and policy.param_dtype)


@constant_when_traced
def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has to gather the parameters of a module, or of a part of it, before it runs."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    sharded = sys.modules["torch.distributed.tensor"].DTensor
    has_hooks = any(isinstance(part, fsdp.FSDPModule) for part in module.modules())
    return has_hooks or any(isinstance(parameter, sharded) for parameter in module.parameters())


def saved_tensor_hooks_active() -> bool:
    """Whether a tape, a checkpoint or a user's hooks are around this code; True where an old torch does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Raise when the graph that this is traced into runs and the condition does not hold."""
    torch._assert_async(condition, message)


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


@contextmanager
def noting_allocations(changes: list[int]) -> Iterator[None]:
    """A context after which `changes` has the bytes of every allocation on the host, and, negative, of every release.

    The profiler sees those of compiled code too, which no dispatch mode does.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    results: Any = profiler.profiler
    changes.extend(event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")


@functools.cache
def load_compiler() -> None:
    """Import the compiler, which the first operator under a dispatch mode does otherwise.

    That leaves the frames of all its callers in a cycle, and what they hold in memory, until garbage is collected.
    """
    torch.compiler.disable(load_compiler)
    gc.collect()


def tracing_backend() -> Any:
    """The backend that the compiler traces this code for; None if no code is traced."""
    return _tracing_backends()[-1]


def _tracing_backends() -> list[Any]:
    """The backend with the wrappers around it, outermost first: of `torch.compile`, and what splits graphs for DDP."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        outermost = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return [None]
    return _unwrapped(outermost)


def _unwrapped(backend: Any) -> list[Any]:
    backends = [backend]
    while True:
        outer = backends[-1]
        holders = [outer, getattr(outer, "__self__", None)]
        names = ("_torchdynamo_orig_backend", "compiler_fn", "backend_compile_fn")
        inner = [value for each in holders for name in names if (value := getattr(each, name, None)) is not None]
        if not inner or inner[0] in backends:
            return backends
        backends.append(inner[0])


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled by itself."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def backends_of(module: nn.Module) -> list[Any]:
    """The backend that a module was compiled with by itself, and the wrappers around it; empty if it was not."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return []
    context: Any = None
    if is_compiled(module):
        context = module.dynamo_ctx
    elif module._compiled_call_impl is not None:
        context = inspect.getclosurevars(module._compiled_call_impl).nonlocals.get("self")
    return [] if context is None else _unwrapped(context.callback)


def compiled_code(branch: Any) -> tuple[CodeType, ...]:
    """The code of which the compiler has graphs, for a module or function that was compiled; otherwise nothing."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return ()
    called = branch
    if isinstance(branch, nn.Module):
        called = branch.forward if is_compiled(branch) else branch._compiled_call_impl
    original = getattr(called, "_torchdynamo_orig_callable", None)
    if original is None:
        return ()
    wrapped = getattr(branch, "_orig_mod", branch)
    has_own_frame = getattr(original, "__self__", None) is not wrapped  # otherwise its forward is what is compiled
    code = getattr(original if has_own_frame else wrapped.forward, "__code__", None)
    return () if code is None else (code,)


def last_graphs(codes: Iterable[CodeType]) -> Sequence[int]:
    """For code that is compiled, which of its graphs ran last: the compiler moves it to the front."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = map(_debug_get_cache_entry_list, codes)
    return [id(each[0].code) if each else 0 for each in entries]
