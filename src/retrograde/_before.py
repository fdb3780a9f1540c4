"""The state around a run that is to leave no trace: generators and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _randomness as randomness
from ._branch import reachable


class Before:
    """Generators and buffers as they are now, to be put back; those that branches close over among them."""

    def __init__(self, parts: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
        modules, generators = reached(parts, devices)
        self._keep([BuffersBefore(module) for module in modules], generators)

    def _keep(self, modules: Sequence[BuffersBefore], generators: Iterable[Any]) -> None:
        self._modules = modules
        self._states = [(g, randomness.read(g)) for g in generators]

    def restore(self) -> None:
        for generator, state in self._states:
            randomness.write(generator, state)
        for module in self._modules:
            module.restore()


class BuffersBefore:
    """The buffers of one module as they are now: which tensors they are, and their values."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers = {name: (buffer, _copied(buffer)) for name, buffer in module._buffers.items()}

    def restore(self) -> None:
        for name, (buffer, value) in self.buffers.items():
            self.module._buffers[name] = buffer
            if buffer is not None and value is not None:
                put_back(buffer, value)


def put_back(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor its value again. One that has it keeps its version: an earlier call may have saved it."""
    if not same_values(tensor, value):
        with torch.no_grad():
            tensor.detach().copy_(value)


def same_values(now: Tensor, then: Tensor) -> bool:
    """Whether two tensors are alike in shape, dtype and values, NaN being equal to itself."""
    if now.shape != then.shape or now.dtype != then.dtype:
        return False
    if now.is_floating_point():
        return bool(torch.equal(now.detach().nan_to_num(), then.nan_to_num()))
    return bool(torch.equal(now, then))


def reached(parts: Iterable[nn.Module], devices: Iterable[torch.device]) -> tuple[list[nn.Module], list[Any]]:
    """All modules in some parts, and all generators that a run of them may draw from.

    A step's branch may be a function: what it closes over counts too.
    """
    modules: dict[nn.Module, None] = {}
    loose: list[Any] = []
    for part in parts:
        for module in part.modules():
            modules[module] = None
            branch = vars(module).get("branch")  # of a step; one that is a module is found as such
            for value in () if branch is None else reachable(branch):
                loose.append(value)
                if isinstance(value, nn.Module):
                    modules |= dict.fromkeys(value.modules())
    own = randomness.owned([*randomness.held_in(map(vars, modules)), *loose])
    every = [*randomness.everyday(list(dict.fromkeys(devices))), *randomness.rare(), *own]
    return list(modules), list({id(generator): generator for generator in every}.values())


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()
