"""Leaving everything as it was: the state around a run, to be put back.

What is kept: buffers, plain attributes (counters and caches that a module keeps for itself; containers of the
standard library one level deep; objects of other classes are left alone), training flags, gradients, and the
generators of random numbers, global ones and those that modules own. Parameters are not copied: a forward and a
backward pass leave them unchanged.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.network.reachable import leaves_reached, reachable

from . import rng
from .fake_internals import has_values
from .module_state import generators_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
"""Containers that are copied and restored; not those of derived classes, which may refuse to be changed."""


@contextmanager
def preserve(*parts: nn.Module, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Leave modules, what their branches close over, and all generators as they were, whatever runs inside.

    Gradients are put back too; inside, they are those that were there.

    Args:
        devices: further devices whose generators may be drawn from; those of the parameters are known.
    """
    snapshot = StateSnapshot.of(parts, devices)
    try:
        yield
    finally:
        snapshot.restore()


class StateSnapshot:
    """The state of some named modules and generators now. `restore` brings it back."""

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], generators: Iterable[Any], leaves: Iterable[Tensor] = ()
    ) -> None:
        self._modules = [_ModuleState(name, module) for name, module in modules]
        self._generators = [(g, rng.read(g)) for g in generators]
        self._gradients = [(leaf, leaf.grad) for leaf in leaves]

    @classmethod
    def of(cls, parts: Sequence[nn.Module], devices: Iterable[torch.device] = ()) -> StateSnapshot:
        """The state of all modules in some parts, and of all generators that a run of them may draw from."""
        of_parameters = (p.device for part in parts for p in part.parameters())
        modules, generators = reached(parts, (*devices, *of_parameters))
        branches = (vars(module).get("branch") for module in modules)  # those that are functions
        leaves = [leaf for branch in branches if branch is not None for leaf in leaves_reached(branch)]
        return cls([("", module) for module in modules], generators, leaves)

    def restore(self) -> None:
        for generator, state in self._generators:
            rng.write(generator, state)
        for module in self._modules:
            module.restore()
        for leaf, gradient in self._gradients:
            leaf.grad = gradient

    def changed_buffers(self) -> list[str]:
        return [name for state in self._modules for name in state.changed_buffers()]

    def changed_attributes(self) -> list[str]:
        return [name for state in self._modules for name in state.changed_attributes()]

    def moved_generators(self) -> list[Any]:
        return [g for g, value in self._generators if rng.read(g) != value]


class _ModuleState:
    """The state of one module: which tensors and objects it has, and their values."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.training = module.training
        self.gradients = [(p, p.grad) for p in module._parameters.values() if p is not None]
        self.buffers = {name: (buffer, _copied(buffer)) for name, buffer in module._buffers.items()}
        self.attributes = {n: (v, _copied(v)) for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}

    def restore(self) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for name in self.module._buffers.keys() - self.buffers.keys():
            del self.module._buffers[name]
        for name, (buffer, value) in self.buffers.items():
            self.module._buffers[name] = buffer
            _put_back(buffer, value)
        if self.module.training != self.training:
            self.module.training = self.training
        attributes = vars(self.module)
        for name in attributes.keys() - self.attributes.keys() - _OF_EVERY_MODULE:
            del attributes[name]
        for name, (thing, value) in self.attributes.items():
            attributes[name] = thing
            _put_back(thing, value)

    def changed_buffers(self) -> list[str]:
        now = self.module._buffers
        return [self._path(n) for n, (_, value) in self.buffers.items() if not _same(now.get(n), value)]

    def changed_attributes(self) -> list[str]:
        if type(self.module).__module__.startswith("retrograde."):
            return []  # what a stack notes for itself is none of a branch's doing
        now = {n: v for n, v in vars(self.module).items() if n not in _OF_EVERY_MODULE}
        new = [n for n in now if n not in self.attributes]
        return [self._path(n) for n in new] + [
            self._path(n) for n, (_, value) in self.attributes.items() if n not in now or not _same(now[n], value)
        ]

    def _path(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def reached(parts: Iterable[nn.Module], devices: Iterable[torch.device]) -> tuple[list[nn.Module], list[Any]]:
    """All modules in some parts, and all generators that a run of them may draw from.

    A step's branch may be a function: what it closes over counts too.
    """
    modules: dict[nn.Module, None] = {}
    closed_over: list[Any] = []
    parts = list(parts)
    for part in parts:
        for module in part.modules():
            modules[module] = None
            branch = vars(module).get("branch")  # of a step; one that is a module is found as such
            for value in () if branch is None else reachable(branch):
                closed_over.append(value)
                if isinstance(value, nn.Module):
                    modules |= dict.fromkeys(value.modules())
    roots = [*parts, *(v for v in closed_over if isinstance(v, nn.Module))]
    own = [*generators_of(dict.fromkeys(roots), closed_over), *rng.generators_in(closed_over)]
    every = [*rng.torch_generators(list(dict.fromkeys(devices))), *rng.global_generators(), *own]
    return list(modules), list({id(generator): generator for generator in every}.values())


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _put_back(thing: Any, value: Any) -> None:
    """Give an object its value again. A tensor that has it keeps its version: an earlier call may have saved it."""
    if isinstance(thing, Tensor):
        if not _same(thing, value):
            with torch.no_grad():
                (thing.detach() if thing.layout is torch.strided else thing).copy_(value)
    elif type(thing) in _CONTAINERS:
        thing.clear()
        (thing.extend if isinstance(thing, (list, deque)) else thing.update)(value)


def _same(now: Any, then: Any) -> bool:
    """Whether two values are alike: tensors in shape, dtype and values, NaN being equal to itself."""
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        if now.shape != then.shape or now.dtype != then.dtype:
            return False
        if not (has_values(now) and has_values(then)):
            return True
        if now.layout is not torch.strided:
            return _same(_parts(now), _parts(then))
        if now.is_floating_point():
            return bool(torch.equal(now.detach().nan_to_num(), then.nan_to_num()))
        return bool(torch.equal(now, then))
    if type(now) in (list, tuple, deque) and type(then) is type(now):
        return len(now) == len(then) and all(_same(a, b) for a, b in zip(now, then, strict=True))
    if isinstance(now, dict) and type(now) in _CONTAINERS and type(then) is type(now):
        return now.keys() == then.keys() and all(_same(now[k], then[k]) for k in now)
    return now is then or (isinstance(now, (int, float, str, set)) and type(now) is type(then) and now == then)


def _parts(tensor: Tensor) -> list[Any]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return [tensor.indices(), tensor.values()]
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = [tensor.crow_indices, tensor.col_indices] if by_row else [tensor.ccol_indices, tensor.row_indices]
    return [*(place() for place in places), tensor.detach().values()]
