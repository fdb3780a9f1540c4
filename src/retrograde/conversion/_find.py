"""Where a model has its layers in a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from retrograde.sequence import ReversibleSequence

Layers = str | Sequence[str] | None
"""What users give as `layers`: the name of a list, a pattern such as "stages.*.blocks", several of them, or nothing."""

CONTAINERS = (nn.ModuleList, nn.Sequential)
_PATH = re.compile(r"([^\[]*)(?:\[(\d*):(\d*)\])?")


@dataclass(frozen=True)
class LayerList:
    """Layers that a model calls in a row.

    Attributes:
        path: the name of the list, with a slice if these are not all its layers: "encoder.block[1:]".
        layers: the layers.
    """

    path: str
    layers: list[nn.Module]

    @property
    def name(self) -> str:
        """The name of the list without a slice."""
        return self.path.partition("[")[0]

    @property
    def first(self) -> int:
        """The index of the first of these layers in the list."""
        start = self.path.partition("[")[2].partition(":")[0]
        return int(start) if start else 0

    def part(self, start: int, stop: int | None) -> str:
        """The path of some of these layers, by their indices among them."""
        return f"{self.name}[{self.first + start or ''}:{'' if stop is None else self.first + stop}]"


def find_layers(model: nn.Module, layers: Layers) -> list[LayerList]:
    """The lists of layers that were named, or the only one in the model."""
    if layers is not None:
        paths = [layers] if isinstance(layers, str) else _names_of(layers)
        if not paths:
            raise ValueError("layers=[] names no list to convert.")
        return [place for path in paths for place in _named(model, path)]
    lists = list(_lists(model, nn.ModuleList)) or list(_lists(model, nn.Sequential))
    if len(lists) == 1:
        return [LayerList(lists[0][0], list(lists[0][1]))]
    _check_not_reversible(model, "" if lists else None)
    others = [name for name, _ in _lists(model, nn.ModuleList, classes="several")]
    raise ValueError(
        f"{type(model).__name__} has {len(lists) or 'no'} lists of two or more layers of one class"
        + (f": {', '.join(repr(name) for name, _ in lists)}. " if lists else ". ")
        + (f"Lists of several classes: {', '.join(map(repr, others))}. " if others else "")
        + "Name the nn.ModuleList or nn.Sequential to convert, as in layers='transformer.h', or several: "
        "layers=['encoder.layers', 'decoder.layers'], layers='stages.*.blocks'."
    )


def _names_of(layers: object) -> list[str]:
    """Several names; an error for anything else, such as the list of layers itself."""
    names = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, nn.Module) else [layers]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"layers= got a {type(layers).__name__}, and takes names in the model: layers='transformer.h', "
            "or several: layers=['encoder.layers', 'decoder.layers']. model.named_modules() lists them."
        )
    return [name for name in names if isinstance(name, str)]


def _named(model: nn.Module, path: str) -> list[LayerList]:
    """The lists that a path or a pattern names."""
    _check_not_reversible(model, path.partition("[")[0])
    if "*" not in path:
        return [LayerList(path, _layers_at(model, path))]
    pattern, bracket, bounds = path.partition("[")
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    names = [name for name, _ in _every_list(model) if wanted.fullmatch(name)]
    if not names:
        raise _no_part(model, path)
    return [place for name in names for place in _named(model, name + bracket + bounds)]


def _layers_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The layers of the named list, or those of them that a slice such as "[1:]" selects."""
    bounds = _PATH.fullmatch(path)
    try:
        module: nn.Module | None = model.get_submodule(path.partition("[")[0])
    except AttributeError:
        module = None
    if module is None or bounds is None:
        raise _no_part(model, path)
    if not isinstance(module, CONTAINERS) or not len(module):
        raise ValueError(
            f"layers={path!r} is a {type(module).__name__}; name an nn.ModuleList or nn.Sequential that is not empty."
        )
    start, stop = (int(bound) if bound else None for bound in bounds.groups()[1:])
    layers = list(module)[start:stop]
    if not layers:
        raise ValueError(f"layers={path!r} selects none of the {len(module)} layers of {bounds[1]!r}.")
    if isinstance(layers[0], (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"layers={path!r} is a list of lists; name one of these, as in layers='{bounds[1]}.0', or all: "
            f"layers='{bounds[1]}.*'."
        )
    return layers


def _no_part(model: nn.Module, path: str) -> ValueError:
    names = ", ".join(repr(name) for name, _ in _every_list(model))
    return ValueError(f"{type(model).__name__} has no part {path!r} (layers=). Its lists are {names or 'none'}.")


def _check_not_reversible(model: nn.Module, name: str | None) -> None:
    """Raise if what was named is a reversible stack, or is in one; None stands for a model without other lists."""
    for stack, module in model.named_modules():
        is_named = name is None or f"{name}.".startswith(f"{stack}." if stack else "")
        if isinstance(module, ReversibleSequence) and is_named:
            what = f"{stack!r} is a ReversibleSequence" if stack else "it is a ReversibleSequence itself"
            raise ValueError(
                f"{type(model).__name__} is reversible already: {what}, and `convert` makes ordinary residual layers "
                "reversible. Choose how it trains by its memory, as in stack.memory = 'reverse'."
            )


def _every_list(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """All lists of a model but for those in reversible stacks.

    An nn.Sequential counts if its layers have parts: one of plain operators is no list of layers.
    """
    inner: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ReversibleSequence):
            inner.append(f"{name}." if name else "")
            continue
        is_list = isinstance(module, nn.ModuleList)
        if not is_list and isinstance(module, nn.Sequential):
            is_list = all([*layer.children()] for layer in module)
        if is_list and not any(name.startswith(prefix) for prefix in inner):
            yield name, module


def _lists(
    model: nn.Module, kind: type[nn.Module], classes: Literal["one", "several"] = "one"
) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """The outermost lists of layers of one class, or those of several classes that are in none of these."""
    outer: list[str] = []
    for name, module in _every_list(model):
        if not isinstance(module, kind) or len(module) < 2 or any(name.startswith(prefix) for prefix in outer):
            continue
        number = "one" if len({type(m) for m in module}) == 1 else "several"
        if number == "one" or classes == "several":
            outer.append(f"{name}." if name else "")
        if number == classes:
            yield name, module
