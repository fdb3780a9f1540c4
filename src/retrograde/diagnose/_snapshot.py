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
from retrograde._branch import reachable
from retrograde._step import Step

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set)


class Snapshot:
    """The state of some named modules and generators now. `restore` brings it back."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], generators: Iterable[Any]) -> None:
        self._modules = [_ModuleState(name, module) for name, module in modules]
        self.generators = [(g, randomness.read(g)) for g in generators]

    def restore(self) -> None:
        for state in self._modules:
            state.restore()
        for generator, value in self.generators:
            randomness.write(generator, value)

    def changed_buffers(self) -> list[str]:
        return [name for state in self._modules for name in state.changed_buffers()]

    def changed_attributes(self) -> list[str]:
        return [name for state in self._modules for name in state.changed_attributes()]

    def moved_generators(self) -> list[Any]:
        return [g for g, value in self.generators if randomness.read(g) != value]


class _ModuleState:
    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.training = module.training
        self.buffers = {n: (b, _copied(b)) for n, b in module._buffers.items()}
        self.attributes = {n: (v, _copied(v)) for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}

    def restore(self) -> None:
        self.module.training = self.training
        for name, (buffer, value) in self.buffers.items():
            self.module._buffers[name] = buffer
            _put_back(buffer, value)
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
        if not _same(thing, value):
            with torch.no_grad():
                thing.detach().copy_(value)
    elif isinstance(thing, list):
        thing[:] = value
    elif isinstance(thing, (dict, set)):
        thing.clear()
        thing.update(value)


def _same(now: Any, then: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.shape == then.shape and now.dtype == then.dtype and _equal_or_both_nan(now.detach(), then)
    if type(now) in (list, tuple) and type(then) is type(now):
        return len(now) == len(then) and all(_same(a, b) for a, b in zip(now, then, strict=True))
    if type(now) is dict and type(then) is dict:
        return now.keys() == then.keys() and all(_same(now[k], then[k]) for k in now)
    return now is then or (isinstance(now, (int, float, str, set)) and type(now) is type(then) and now == then)


def _equal_or_both_nan(now: Tensor, then: Tensor) -> bool:
    if now.is_floating_point():
        return bool(torch.equal(now.nan_to_num(), then.nan_to_num()))
    return bool(torch.equal(now, then))


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


def generators_of(step: Step) -> list[Any]:
    """The generators that a step's branch owns or closes over."""
    held = randomness.held_by(module for _, module in named_modules_of(step))
    return _each_once(randomness.owned([*held, *reachable(step.branch)]))


def global_generators(devices: Iterable[torch.device]) -> list[Any]:
    return [*randomness.everyday(list(dict.fromkeys(devices))), *randomness.rare()]


def _each_once(things: list[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


@contextmanager
def unchanged(model: nn.Module, steps: Iterable[Step], devices: Iterable[torch.device]) -> Iterator[Snapshot]:
    """Leave a model as it was found, whatever runs inside. Gradients must not be accumulated there."""
    steps = list(steps)
    named = [*model.named_modules(), *(pair for step in steps for pair in named_modules_of(step))]
    modules = list({id(module): (name, module) for name, module in named}.values())
    owned = randomness.owned(randomness.held_by(module for _, module in modules))
    generators = _each_once([*global_generators(devices), *owned, *(g for s in steps for g in generators_of(s))])
    snapshot = Snapshot(modules, generators)
    try:
        yield snapshot
    finally:
        snapshot.restore()
