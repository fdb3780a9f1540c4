"""Every backward pass in a fresh thread, as on an accelerator, where autograd's own thread runs it.

NOTE [What the thread starts with]
 torch hands on to its threads what it keeps per thread: the grad mode, the modes of Python, whether autocast is on
 (not its dtype), the hooks for saved tensors, what was stashed for them. What Python keeps per thread stays behind. A
 backward pass inside a backward pass stays in its thread, and one under a transform of torch.func in its caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from retrograde.engine.torch_internals import current_graph_task, inside_function_transform

STASHED = ("context", *(f"retrograde.{n}" for n in ("open decisions", "watchers of decisions", "rng locks")))


@contextmanager
def backward_in_threads() -> Iterator[list[int]]:
    """Run each `backward` and `autograd.grad` in a thread of its own. Yields the threads that ran one."""
    run_here = torch.autograd._engine_run_backward
    threads: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if current_graph_task() >= 0 or inside_function_transform() or _is_batched():
            return run_here(*args, **kwargs)
        results: list[Any] = []
        errors: list[BaseException] = []
        inherited = _inherited()

        def work() -> None:
            threads.append(threading.get_ident())
            try:
                with ExitStack() as stack:
                    _inherit(stack, *inherited)
                    results.append(run_here(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="backward")
        thread.start()
        thread.join()
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # a traceback that holds this frame would hold tensors
        return results[0]

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    try:
        yield threads
    finally:
        torch.autograd._engine_run_backward = run_here


def _is_batched() -> bool:
    """Whether `is_grads_batched` is at work, whose level torch keeps for the thread."""
    levels = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return levels > 1


def _inherited() -> tuple[Any, ...]:
    kinds = [kind for kind in ("cpu", "toy") if kind == "cpu" or torch._C._get_privateuse1_backend_name() == kind]
    return (
        torch.is_grad_enabled(),
        [kind for kind in kinds if torch.is_autocast_enabled(kind)],
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        {key: torch._C._get_obj_in_tls(key) for key in STASHED if torch._C._is_key_in_tls(key)},
    )


def _inherit(
    stack: ExitStack, grad: bool, casts: list[str], functions: list[Any], dispatch: list[Any], hooks: Any, stashed: Any
) -> None:
    torch.set_num_threads(torch.get_num_threads())  # MKL has its own number in each thread; autograd's threads set it
    stack.enter_context(torch.set_grad_enabled(grad))
    for kind in casts:
        torch.set_autocast_enabled(kind, True)
    for mode in functions:
        _push_mode(mode)
    for mode in dispatch:
        torch._C._push_on_torch_dispatch_stack(mode)
    if hooks is not None:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
    for key, value in stashed.items():
        torch._C._stash_obj_in_tls(key, value)
