"""The private parts of torch for tensors without values and for processes that do not exist, as read in torch 2.13."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._device import _device_constructors

Model = TypeVar("Model")


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has numbers: not on the meta device, and not under FakeTensorMode."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


FAKE_TENSOR_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What tensors without values raise where a program needs a value: `.item()`, a shape that depends on the data."""


def fake_mode() -> Any:
    """A context in which tensors have shapes and no values, and nothing is allocated."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(mode: Any, value: Model) -> Model:
    """A module or a batch whose tensors have no values, in a mode that `fake_mode` returned."""
    with FakeCopyMode(mode):
        return copy.deepcopy(value)


def takes_default_device(function: Any) -> bool:
    """Whether a function of torch makes a tensor on the default device unless it is given another."""
    return function in _device_constructors()


@contextmanager
def initialising_without_values() -> Iterator[None]:
    """A context in which `nn.init.trunc_normal_`, which draws until all values are in range, draws nothing.

    As read in torch 2.13, where it does so for tensors on "meta" only.
    """
    original = nn.init._no_grad_trunc_normal_

    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    nn.init._no_grad_trunc_normal_ = initialise
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextmanager
def converting_fake_modules() -> Iterator[None]:
    """A context in which `Module.to` and its kin work on modules without values.

    torch exchanges such a parameter with its conversion in place, and refuses where a weak reference to it exists.
    """
    original = nn.Module._apply

    def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        conversions: dict[Tensor, Tensor] = {}  # tied parameters stay tied

        def converted(tensor: Tensor) -> Tensor:
            with torch.no_grad():
                if tensor not in conversions:
                    conversions[tensor] = fn(tensor)
                return conversions[tensor]

        for part in module.modules() if recurse else (module,):
            for name, parameter in part._parameters.items():
                if parameter is not None and converted(parameter) is not parameter:
                    if not isinstance(conversions[parameter], nn.Parameter):
                        conversions[parameter] = nn.Parameter(conversions[parameter], parameter.requires_grad)
                    part._parameters[name] = conversions[parameter]  # type: ignore[assignment]
            part._buffers.update({name: b if b is None else converted(b) for name, b in part._buffers.items()})
        return module

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """A context in which this process is the first of so many, and collectives move nothing."""
    from torch.testing._internal.distributed import fake_pg

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def process_group_named(name: str) -> Any:
    """The process group of a name, by which functional collectives call it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
