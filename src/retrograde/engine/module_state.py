"""The modules below a branch as they were found, and whether they still are the same."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, getitem, is_
from typing import Any

from torch import Tensor, nn

from . import rng

Place = tuple[dict[str, Any], str]
"""The dictionary that a module looks something up in, and the name there. `functional_call`, FSDP and users write
into it."""

BATCH_STATISTICS = ("running_mean", "running_var")
_KINDS = ("training", "_modules", "_parameters", "_buffers")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_requires_grad = attrgetter("requires_grad")
_PLAIN_TYPES: set[type] = set()  # of attributes that are neither generators nor tensors, nor may contain them


class ModuleSnapshot:
    """Every module below some roots, with the places of its submodules, parameters and buffers.

    It is asked for in each run of a step, and taken anew only if `is_current` finds that something has changed.
    """

    __slots__ = ("_attributes", "_dicts", "_flagged", "_names", "_own_names", "_own_sizes", "_own_slots", "_sizes",
                 "_slots", "_things", "buffers", "contents",
                 "modules", "places", "requires", "tensors", "tracked", "training")  # fmt: skip

    def __init__(self, roots: list[nn.Module]) -> None:
        modules = self.modules = roots
        places: list[Place] = []
        contents: list[Any] = []
        tensors: list[Tensor] = []
        buffers: list[tuple[dict[str, Any], str, bool]] = []  # the flag: may be edited without a new version
        training: list[bool] = []
        compared: list[tuple[dict[str, Any], str, Any]] = []  # the places, and those of the dictionaries and flags
        for module in modules:  # the list grows as it is walked
            parts = module.__dict__
            training.append(module.training)
            compared.extend([(parts, kind, parts[kind]) for kind in _KINDS if kind in parts])
            for kind in ("_modules", "_parameters"):
                slots = parts[kind]
                for name, thing in slots.items():
                    compared.append((slots, name, thing))
                    places.append((slots, name))
                    contents.append(thing)
                    if thing is not None:
                        (modules if kind == "_modules" else tensors).append(thing)
            slots = parts["_buffers"]
            buffers.extend([(slots, n, module.training and _may_hide_edits(n, slots[n])) for n in slots])
        self.places = places
        self.contents = contents
        self.tensors = tensors
        self.tracked = [t for t in tensors if not t.is_inference()]  # those that have versions
        self.buffers = buffers
        self.training = training
        self.requires = list(map(_requires_grad, tensors))
        self._flagged = [m for m in modules if "training" not in m.__dict__]  # a property of what torch.compile makes
        self._attributes = [vars(m) for m in modules if not type(m).__module__.startswith("torch.nn.")]
        own = [(values, name) for values in self._attributes for name in values if name not in _OF_EVERY_MODULE]
        self._own_slots, self._own_names = [values for values, _ in own], [name for _, name in own]
        self._own_sizes = list(map(len, self._attributes))
        self._dicts = [thing for _, _, thing in compared if isinstance(thing, dict)]
        self._sizes = list(map(len, self._dicts))
        self._slots = [slots for slots, _, _ in compared]
        self._names = [name for _, name, _ in compared]
        self._things = [thing for _, _, thing in compared]

    def is_current(self) -> bool:
        """Whether a snapshot taken now would be the same. It is asked twice per step: no Python runs per place."""
        try:
            same = all(map(is_, map(getitem, self._slots, self._names), self._things))
        except KeyError:
            return False
        return (
            same
            and list(map(len, self._dicts)) == self._sizes
            and list(map(_requires_grad, self.tensors)) == self.requires
            and (not self._flagged or [m.training for m in self.modules] == self.training)
        )

    def has_new_buffers(self) -> bool:
        """Whether a module has other buffers than it had, such as one that a forward registers."""
        return sum(len(m._buffers) for m in self.modules) != len(self.buffers)

    def unregistered(self) -> list[Any]:
        """Generators and plain tensors among the attributes of the modules, or in lists there."""
        return generators_and_tensors(self._attributes)

    def is_steady(self) -> bool:
        """Whether it is current, and no attribute is a generator or a plain tensor, which would have to be recorded."""
        if not self.is_current():
            return False
        if list(map(len, self._attributes)) == self._own_sizes:
            try:
                if _PLAIN_TYPES.issuperset(map(type, map(getitem, self._own_slots, self._own_names))):
                    return True
            except KeyError:
                pass
        return not self.unregistered()


def generators_and_tensors(attributes: Iterable[dict[str, Any]]) -> list[Any]:
    """Generators and plain tensors among the attributes of modules, or in lists there."""
    recorded: list[Any] = []
    for values in attributes:
        if not _PLAIN_TYPES.issuperset(map(type, values.values())):
            for value in values.values():
                several = value if isinstance(value, (list, tuple)) else (value,)
                recorded.extend(v for v in several if isinstance(v, Tensor) or rng.is_generator(v))
                if not isinstance(value, (list, tuple, Tensor)) and not rng.is_generator(value):
                    _PLAIN_TYPES.add(type(value))
    return recorded


def refresh_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Have recurrent modules read the weights in their places: they hold a list of them besides."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _may_hide_edits(name: str, buffer: Tensor | None) -> bool:
    """Whether an edit may leave the version unchanged: batch normalisation edits its statistics so, and `.data` does.

    Statistics are small, whatever their names. A large buffer is not worth a copy in every call, nor one on
    an accelerator, which would have to wait for the comparison.
    """
    if buffer is None or not buffer.is_floating_point():
        return False
    return name in BATCH_STATISTICS or (buffer.device.type == "cpu" and buffer.numel() <= 4096)
