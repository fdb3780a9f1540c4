"""A place where models are made and trained without values: nothing is allocated, on any device, for any rank.

NOTE [What is the same on paper]
 1. The factory, the model, the loss, the optimiser, FSDP2 and tensor parallelism are the user's and torch's own code,
    run under `FakeTensorMode`. Only the kernels are left out, and what collectives move.
 2. Every device is the CPU to torch: fake tensors of a device that this torch was not built for have no backward pass.
    Moves to "cuda", `device="cuda"` and `autocast("cuda")` are taken to mean it. So operators are those that the CPU's
    dispatch gives: attention is flash attention, dropout keeps a mask of the input's dtype where an accelerator
    keeps booleans.
 3. What depends on values cannot run: `.item()`, `nonzero`, shapes that depend on the data.
 4. Compiled models run uncompiled. What a compiler fuses, and so what it saves, depends on the device.
"""

from __future__ import annotations

import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

from retrograde.engine.fake_internals import (
    FAKE_TENSOR_ERRORS,
    converting_fake_modules,
    fake_mode,
    fake_process_group,
    initialising_without_values,
    takes_default_device,
)
from retrograde.engine.torch_internals import load_compiler

_CPU = torch.device("cpu")
_KINDS = ("cuda", "xpu", "hpu", "mtia", "ipu", "cpu", "pin_memory")
_MOVES = {getattr(Tensor, name) for name in _KINDS if hasattr(Tensor, name)}
_CALLS_OF_A_DEVICE = ("set_device", "synchronize")  # of the module for CUDA, which raise where there is none
_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).resolve().parents[2]
_OPERATORS = "_meta_registrations.py"  # where torch infers results without values
_NOT_HERE = (  # warnings about values, of which there are none
    r"FSDP2-wrapped module",
    r".*data pointer of FakeTensor",
    r"Python's or NumPy's global random generator",
)


class NeedsValuesError(ValueError):
    """A model that cannot run without values; the message names the line of the user's code that needs them."""


@contextmanager
def fake_session(mesh_shape: Sequence[int] = (), names: Sequence[str] = ()) -> Iterator[FakeSession]:
    """A context in which tensors have no values, for the first of the ranks of a mesh."""
    load_compiler()
    ranks = math.prod(mesh_shape)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for message in _NOT_HERE:
            warnings.filterwarnings("ignore", message=message)
        mesh = None
        if ranks > 1:
            if dist.is_initialized():
                raise ValueError(
                    "A plan for several ranks needs a process without a process group: it makes one of its own, in "
                    "which nothing moves. Plan before init_process_group, or in another process."
                )
            stack.enter_context(fake_process_group(ranks))
            mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=tuple(names))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_autocast_on_the_cpu())
        for name in _CALLS_OF_A_DEVICE:
            stack.enter_context(_replaced(torch.get_device_module("cuda"), name, lambda *args, **kwargs: None))
        stack.enter_context(converting_fake_modules())
        stack.enter_context(initialising_without_values())
        mode = stack.enter_context(fake_mode())
        log = logging.getLogger(type(mode).__module__)  # which has what an operator raises, too
        stack.enter_context(_replaced(log, "disabled", True))
        stack.enter_context(_EveryDeviceIsTheCpu())
        yield FakeSession(mode, mesh)


class FakeSession:
    """What a session has: the mode of its tensors, and the mesh of its ranks, if there are several."""

    def __init__(self, mode: Any, mesh: DeviceMesh | None) -> None:
        self.mode = mode
        self.mesh = mesh


@contextmanager
def refusing_values(doing: str) -> Iterator[None]:
    """Around a user's code: what needs values is refused in a sentence that names its line."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FAKE_TENSOR_ERRORS):
            cause = cause.__cause__
        if cause is not None:
            _refuse(doing, error, cause)
        if isinstance(error, RuntimeError) and _was_raised_by_an_operator(error):
            _refuse_operator(doing, error)
        raise


def _refuse(doing: str, error: BaseException, cause: BaseException) -> NoReturn:
    raise NeedsValuesError(
        f"{doing} needs the values of a tensor, and a plan on paper has none: {_own_line(error, cause)} "
        f"({_words(cause)}). Let shapes and branches of the code depend on sizes alone, or plan on a machine that has "
        "the model (without `on`)."
    ) from cause


def _refuse_operator(doing: str, error: RuntimeError) -> NoReturn:
    raise NeedsValuesError(
        f"{doing} failed on tensors without values: {_own_line(error)} ({_words(error)}) If this line runs with "
        "values, torch does not know the operator without them: use another dtype or implementation, or plan on a "
        "machine that has the model (without `on`)."
    ) from error


def _was_raised_by_an_operator(error: BaseException) -> bool:
    """Whether an operator without values raised it, and not the user's code."""
    return any(Path(f.filename).name == _OPERATORS for f in traceback.extract_tb(error.__traceback__))


def _own_line(*errors: BaseException) -> str:
    """The innermost line that is the user's or, inside of it, that of a model of retrograde's own, in words."""
    models = _OURS / "models"
    frames = [f for e in errors for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith("<")]
    own = [f for f in frames if _is_inside(f, models) or not (_is_inside(f, _TORCH) or _is_inside(f, _OURS))]
    line = (own or frames)[-1]
    return f"{Path(line.filename).name}, line {line.lineno}: `{line.line}`"


def _is_inside(frame: traceback.FrameSummary, folder: Path) -> bool:
    return Path(frame.filename).is_relative_to(folder)


def _words(cause: BaseException) -> str:
    """What was tried: the operator's name, which is all that torch's exceptions tell."""
    function = getattr(cause, "func", None)
    return f"{type(cause).__name__}: {function}" if function is not None else str(cause).partition("\n")[0]


class _EveryDeviceIsTheCpu(TorchFunctionMode):
    """Takes every device that is asked for as the CPU (2 of the NOTE)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _MOVES:
            return args[0]
        device = options.get("device")
        if device is None and takes_default_device(func):
            device = torch.get_default_device()
        if _is_elsewhere(device):
            options["device"] = _CPU
        if func is Tensor.to:
            args = [args[0], *(_CPU if _is_elsewhere(arg) else arg for arg in args[1:])]
        return func(*args, **options)


def _is_elsewhere(device: Any) -> bool:
    """Whether this names another device than the CPU, or the one for tensors without values."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if not isinstance(device, (str, torch.device)):
        return False
    return torch.device(device).type not in ("cpu", "meta")


def _autocast_on_the_cpu() -> AbstractContextManager[None]:
    """Autocast for a device that is not here, which torch would disable with a warning."""
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu", *args, **kwargs)

    return _replaced(torch.autocast, "__init__", init)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
