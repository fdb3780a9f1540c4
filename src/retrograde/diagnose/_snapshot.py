"""A model's state outside of its parameters, so that every run of an examination starts from the same one.

What is kept: buffers, plain attributes (counters and caches that a module keeps for itself; lists, dictionaries
and sets one level deep), training flags, and the generators of random numbers, global ones and those that modules own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrograde import _randomness as randomness
from retrograde._before import Before, BuffersBefore, put_back, reached, same_values
from retrograde._branch import reachable
from retrograde._step import Step

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set)


class Snapshot(Before):
    """The state of some named modules and generators now. `restore` brings it back."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], generators: Iterable[Any]) -> None:
        self._named = [_ModuleState(name, module) for name, module in modules]
        self._keep(self._named, generators)

    def changed_buffers(self) -> list[str]:
        return [name for state in self._named for name in state.changed_buffers()]

    def changed_attributes(self) -> list[str]:
        return [name for state in self._named for name in state.changed_attributes()]

    def moved_generators(self) -> list[Any]:
        return [g for g, value in self._states if randomness.read(g) != value]


class _ModuleState(BuffersBefore):
    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.name = name
        self.training = module.training
        self.attributes = {n: (v, _copied(v)) for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}

    def restore(self) -> None:
        super().restore()
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


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _put_back(thing: Any, value: Any) -> None:
    if isinstance(thing, Tensor):
        put_back(thing, value)
    elif isinstance(thing, list):
        thing[:] = value
    elif isinstance(thing, (dict, set)):
        thing.clear()
        thing.update(value)


def _same(now: Any, then: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return same_values(now, then)
    if type(now) in (list, tuple) and type(then) is type(now):
        return len(now) == len(then) and all(_same(a, b) for a, b in zip(now, then, strict=True))
    if type(now) is dict and type(then) is dict:
        return now.keys() == then.keys() and all(_same(now[k], then[k]) for k in now)
    return now is then or (isinstance(now, (int, float, str, set)) and type(now) is type(then) and now == then)


def modules_of(step: Step) -> list[nn.Module]:
    """The modules that a step's branch and coupling reach, each once."""
    roots = [v for v in (*reachable(step.branch), step.coupling) if isinstance(v, nn.Module)]
    return list(dict.fromkeys(roots))


def parameters_of(step: Step) -> list[nn.Parameter]:
    found = [p for module in modules_of(step) for p in module.parameters() if p.requires_grad]
    return list(dict.fromkeys(found))


def named_modules_of(step: Step) -> list[tuple[str, nn.Module]]:
    """Every module in a step's branch and coupling, by its path from there."""
    seen: set[nn.Module] = set()
    return [pair for root in modules_of(step) for pair in root.named_modules(memo=seen)]


@contextmanager
def unchanged(model: nn.Module, devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave a model as it was found, whatever runs inside. Gradients must not be accumulated there."""
    modules, generators = reached([model], devices)
    snapshot = Snapshot([("", module) for module in modules], generators)
    try:
        yield
    finally:
        snapshot.restore()
