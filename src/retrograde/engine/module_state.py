"""The modules below a branch as they were found, and whether they still are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograde.network.reachable import Place, is_foreign, items_of, read_by_functions, read_by_module
from retrograde.network.streams import version

from . import rng

BATCH_STATISTICS = ("running_mean", "running_var")
_KINDS = ("training", "_modules", "_parameters", "_buffers")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types of attributes that are compared and restored: they refer to nothing else. (A list may hold a graph, which would
hold the tape that holds this.)"""
_requires_grad = attrgetter("requires_grad")


class ModuleSnapshot:
    """Every module below some roots, with the places of its submodules, parameters, buffers and attributes.

    It is asked for in each run of a step, and taken anew only if `is_current` finds that something has changed.

    Args:
        roots: the branch, if it is a module, or the modules that it closes over; and the coupling.
        functions: the branch's functions, if it is none.

    Attributes:
        places: where parameters, submodules and attributes are, which `functional_call`, FSDP and users exchange.
        buffers: where buffers are; with the flags "may be edited without a new version" and "is a guest's".
        generators: those in attributes, and those that the code of the modules names or closes over.
        tracked: parameters and plain tensors of which an edit in place is noticed by their versions.
        scripted: the type of a TorchScript module or function among them, if there is one.

    Guests are modules that are not registered: in lists and dictionaries, in globals that a forward names. The branch
    may run them, or just have them (all layers of a model in one list). So they are only watched for what
    a run of the branch itself changes in their buffers.
    """

    __slots__ = ("_dicts", "_flagged", "_names", "_own", "_sizes", "_slots", "_things", "buffers", "generators",
                 "has_guests", "has_tensors", "is_lazy", "modules", "places", "requires", "scripted", "tensors",
                 "tracked", "training")  # fmt: skip

    def __init__(self, roots: list[nn.Module], functions: Sequence[Any] = ()) -> None:
        modules = self.modules = roots
        self.places: list[Place] = []
        self.tensors: list[Tensor] = []
        self.buffers: list[tuple[dict[str, Any], str, bool, bool]] = []
        self.generators: list[Any] = []
        self.scripted = next((type(f).__name__ for f in functions if isinstance(f, torch.jit.ScriptFunction)), None)
        training: list[bool] = []
        compared: list[Place] = []  # the places, and those of the dictionaries and flags
        others: list[Place] = []  # in attributes and globals
        own: list[nn.Module] = []  # whose attributes torch knows nothing of
        for module in modules:  # the list grows as it is walked
            if _is_scripted(module):
                self.scripted = type(module).__name__
                training.append(module.training)
                continue
            parts = module.__dict__
            training.append(module.training)
            compared.extend([(parts, kind, parts[kind]) for kind in _KINDS if kind in parts])
            for kind in ("_modules", "_parameters"):
                slots = parts[kind]
                for name, thing in slots.items():
                    self.places.append((slots, name, thing))
                    if thing is not None:
                        (modules if kind == "_modules" else self.tensors).append(thing)
            self.buffers += _buffers_of(module, is_guest=False)
            if not type(module).__module__.startswith("torch."):
                own.append(module)
                others += read_by_module(module)
        compared += self.places
        plain_tensors = self._note_attributes(own, compared)
        others += read_by_functions(functions)
        others += chain.from_iterable(map(_in_containers, own))
        plain_tensors += self._note_others(others, compared)
        self.has_guests = any(is_guest for _, _, _, is_guest in self.buffers)
        self.is_lazy = any(map(is_lazy, self.tensors))
        self.has_tensors = bool(plain_tensors)
        self.tracked = [t for t in (*self.tensors, *plain_tensors) if not is_lazy(t) and not t.is_inference()]
        self.training = training
        self.requires = list(map(_requires_grad, self.tensors))
        self._flagged = [m for m in modules if "training" not in m.__dict__]  # a property of what torch.compile makes
        self._dicts = [thing for _, _, thing in compared if isinstance(thing, dict)] + list(map(vars, own))
        self._sizes = list(map(len, self._dicts))
        self._own = [(m, frozenset(vars(m))) for m in own if not is_foreign(type(m).__module__)]
        self._slots = [slots for slots, _, _ in compared]
        self._names = [name for _, name, _ in compared]
        self._things = [thing for _, _, thing in compared]

    def _note_attributes(self, own: list[nn.Module], compared: list[Place]) -> list[Tensor]:
        """Note the attributes that are values, tensors or generators. Returns the tensors."""
        tensors: list[Tensor] = []
        for module in own:
            keeps_values = not is_foreign(type(module).__module__)
            for name, value in _attributes_of(module):
                if isinstance(value, Tensor):
                    value = value if value.grad_fn is None else value.detach().requires_grad_()
                    tensors.append(value)
                elif rng.is_generator(value):
                    self.generators.append(value)
                elif not (keeps_values and isinstance(value, _VALUES)):
                    continue
                self.places.append((vars(module), name, value))
                compared.append((vars(module), name, value))
        return tensors

    def _note_others(self, places: list[Place], compared: list[Place]) -> list[Tensor]:
        """Note tensors, generators and modules in containers, globals and closures. Returns the tensors."""
        tensors: list[Tensor] = []
        seen = set(map(id, self.modules))
        for place in places:  # the list grows as it is walked
            slots, _, value = place
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor) and value.grad_fn is None:
                tensors.append(value)
                self.places += [place] if isinstance(slots, (dict, list)) else []
            elif rng.is_generator(value):
                self.generators.append(value)
            elif isinstance(value, nn.Module):
                if not _is_scripted(value):
                    self.buffers += _buffers_of(value, is_guest=True)
                    compared += [(vars(value), "training", value.training)] if "training" in vars(value) else []
                    places += [(None, None, child) for child in value.children()]
            else:
                places += items_of(value)
                continue
            compared += [place] if slots is not None else []
        return tensors

    def is_current(self) -> bool:
        """Whether a snapshot taken now would be the same. It is asked twice per step: no Python runs per place."""
        try:
            same = all(map(is_, map(getitem, self._slots, self._names), self._things))
        except (KeyError, IndexError):
            return False
        return (
            (same or self._has_equal_values())
            and list(map(len, self._dicts)) == self._sizes
            and list(map(_requires_grad, self.tensors)) == self.requires
            and (not self._flagged or [m.training for m in self.modules] == self.training)
        )

    def _has_equal_values(self) -> bool:
        """Whether what is in the places is not the same, but numbers and strings that are equal."""
        for now, then in zip(map(getitem, self._slots, self._names), self._things, strict=True):
            if now is not then and not (type(now) is type(then) and isinstance(now, _VALUES) and now == then):
                return False
        return True

    def guest_buffers(self) -> list[tuple[Tensor | None, int]]:
        """The buffers of guests with their versions, which a run of the branch may change."""
        values = [slots.get(name) for slots, name, _, is_guest in self.buffers if is_guest]
        return [(value, version(value)) for value in values]

    def changed_guests(self, before: Sequence[tuple[Tensor | None, int]]) -> bool:
        """Whether a buffer of a guest was edited or exchanged since `guest_buffers` returned `before`."""
        pairs = zip(before, self.guest_buffers(), strict=True)
        return any(then is not now or old != new for (then, old), (now, new) in pairs)

    def new_attributes(self) -> list[Place]:
        """Values that hide an attribute of the class since (`self.count += 1` with `count = 0` in the class)."""
        return [
            (vars(module), name, value)
            for module, names in self._own
            for name, value in vars(module).items()
            if name not in names and isinstance(value, (*_VALUES, Tensor)) and hasattr(type(module), name)
        ]

    def has_new_buffers(self) -> bool:
        """Whether a module has other buffers than it had, such as one that a forward registers."""
        have = sum(len(m._buffers) for m in self.modules if not _is_scripted(m))
        return have != sum(not is_guest for _, _, _, is_guest in self.buffers)


def generators_of(roots: Iterable[nn.Module], functions: Sequence[Any]) -> list[Any]:
    """The generators that functions, and modules below some roots, have as attributes or name in their code."""
    return ModuleSnapshot(list(roots), functions).generators


def refresh_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Have recurrent modules read the weights in their places: they hold a list of them besides.

    A parametrized weight stays as it is in the list: to read it would compute it, and each forward does so anyway.
    """
    for module in modules:
        if isinstance(module, nn.RNNBase):
            named = zip(module._flat_weights_names, module._flat_weights, strict=True)
            module._flat_weights = [module._parameters.get(name, weight) for name, weight in named]


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _buffers_of(module: nn.Module, *, is_guest: bool) -> list[tuple[dict[str, Any], str, bool, bool]]:
    slots: dict[str, Any] = module._buffers
    return [(slots, name, module.training and _may_hide_edits(name, slots[name]), is_guest) for name in slots]


def _attributes_of(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]


def _in_containers(module: nn.Module) -> list[Place]:
    """What is in the containers among a module's attributes."""
    return [item for _, container in _attributes_of(module) for item in items_of(container)]


def _may_hide_edits(name: str, buffer: Tensor | None) -> bool:
    """Whether an edit may leave the version unchanged: batch normalisation edits its statistics so, and `.data` does.

    Statistics are small, whatever their names. A large buffer is not worth a copy in every call, nor one on
    an accelerator, which would have to wait for the comparison.
    """
    if buffer is None or is_lazy(buffer) or buffer.layout is not torch.strided or not buffer.is_floating_point():
        return False
    return name in BATCH_STATISTICS or (buffer.device.type == "cpu" and buffer.numel() <= 4096)
