"""What a user names: `module:factory`, or `path/to/file.py:factory`. The one loader, for all commands and for `fit`.

The factory returns `(model, batch)`, `(model, batch, loss)` or `(model, batch, loss, optimizer)`. The batch is a
tensor, a tuple of positional arguments or a dictionary of keyword arguments; the loss makes a scalar of the model's
output.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .loss import Loss

CONTRACT = (
    "It must return (model, batch), (model, batch, loss) or (model, batch, loss, optimizer), where batch is a tensor, "
    "a tuple or a dictionary"
)


class TargetError(Exception):
    """A target that cannot be loaded; the message says in a sentence why."""


@dataclass(frozen=True)
class Target:
    """A model, what to call it with, and the loss and the optimiser, if the user has them."""

    name: str
    model: nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None


def load(text: str, **sizes: int) -> Target:
    """Import what `text` names, which runs it as Python, and call the factory with the sizes."""
    place, name = split_target(text)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    factory = getattr(module, name, None)
    if factory is None:
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise TargetError(f"{place} has no {name!r}. It defines {', '.join(own) or 'nothing that can be called'}.")
    if not callable(factory):
        raise TargetError(f"{text} is a value of type {type(factory).__name__}, not a function. {CONTRACT}.")
    try:
        made = factory(**sizes)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's code raises, sys.exit() too
        _give_up(f"{text} raised", error)
    return as_target(text, made)


def split_target(text: str) -> tuple[str, str]:
    """The file or module, and the name of the factory."""
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name.isidentifier() or "\0" in place:
        raise TargetError(
            f"{text!r} does not name a factory. Write module:factory or path/to/file.py:factory, as in "
            "my_model.py:make."
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise TargetError(f"There is no file {place}.")
    return place, name


def as_target(name: str, made: Any) -> Target:
    """What a factory returned, checked."""
    if not isinstance(made, (tuple, list)) or not 2 <= len(made) <= 4 or not isinstance(made[0], nn.Module):
        several = isinstance(made, (tuple, list))
        parts = f"({', '.join(type(m).__name__ for m in made)})" if several else type(made).__name__
        raise TargetError(f"{name} returned {parts}. {CONTRACT}.")
    model, batch, loss, optimizer = (*made, None, None)[:4]
    if loss is not None and not callable(loss):
        raise TargetError(f"The loss that {name} returned is a {type(loss).__name__}, not a function of the output.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(f"The optimizer that {name} returned is a {type(optimizer).__name__}.")
    if isinstance(batch, Mapping) and not all(isinstance(key, str) for key in batch):
        raise TargetError(f"The batch that {name} returned has keys that are no strings. {CONTRACT}.")
    if not isinstance(batch, (Tensor, Mapping, tuple, list)):
        raise TargetError(f"The batch that {name} returned is a {type(batch).__name__}. {CONTRACT}.")
    return Target(name, model, batch, loss, optimizer)


def _from_file(path: Path) -> ModuleType:
    """Run a file whatever its name, which may be one that no import statement could write."""
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as when it is run
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's code raises, sys.exit() too
        _give_up(f"{path} could not be run:", error)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's code raises, sys.exit() too
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise TargetError(f"There is no module {missing!r}. Is it a file? Write {name}.py with its path.") from None
        _give_up(f"{name} could not be imported:", error)


def _give_up(what: str, error: BaseException) -> NoReturn:
    """Say what a user's code raised, and in which line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    raise TargetError(f"{what} {type(error).__name__}: {error} ({where})") from error
