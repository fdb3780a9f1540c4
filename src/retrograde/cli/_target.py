"""What a user names on the command line: `module:factory`, or `path/to/file.py:factory`.

The factory takes no arguments and returns `(model, batch)` or `(model, batch, loss)`. The batch is a tensor, a tuple of
positional arguments or a dictionary of keyword arguments; the loss makes a scalar of the model's output.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch import Tensor, nn

from retrograde.planning._trial import module_of_file

CONTRACT = "It must return (model, batch) or (model, batch, loss), where batch is a tensor, a tuple or a dictionary"


class TargetError(Exception):
    """A target that cannot be loaded; the message says in a sentence why."""


@dataclass(frozen=True)
class Target:
    """A model, what to call it with, and the loss of its output, if the user has one."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def load(text: str) -> Target:
    """Import what `text` names, which runs it as Python, and call the factory."""
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise TargetError(
            f"{text!r} does not name a factory. Write module:factory or path/to/file.py:factory, as in "
            "my_model.py:make."
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    factory = getattr(module, name, None)
    if factory is None:
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise TargetError(f"{place} has no {name!r}. It defines {', '.join(own) or 'nothing that can be called'}.")
    if not callable(factory):
        raise TargetError(f"{text} is a value of type {type(factory).__name__}, not a function. {CONTRACT}.")
    try:
        made = factory()
    except Exception as error:  # whatever a user's code raises
        _give_up(f"{text} raised", error)
    return _target(text, made)


def _target(text: str, made: Any) -> Target:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        parts = f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__
        raise TargetError(f"{text} returned {parts}. {CONTRACT}.")
    model, batch, loss = made if len(made) == 3 else (*made, None)
    if loss is not None and not callable(loss):
        raise TargetError(f"The loss that {text} returned is a {type(loss).__name__}, not a function of the output.")
    if isinstance(batch, Tensor):
        return Target(text, model, (batch,), {}, loss)
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return Target(text, model, (), dict(batch), loss)
    if isinstance(batch, (tuple, list)):
        return Target(text, model, tuple(batch), {}, loss)
    raise TargetError(f"The batch that {text} returned is a {type(batch).__name__}. {CONTRACT}.")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"There is no file {path}.")
    try:
        return module_of_file(path)
    except Exception as error:  # whatever a user's code raises
        _give_up(f"{path} could not be run:", error)


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise TargetError(f"There is no module {missing!r}. Is it a file? Write {name}.py with its path.") from None
        _give_up(f"{name} could not be imported:", error)
    except Exception as error:  # whatever a user's code raises
        _give_up(f"{name} could not be imported:", error)


def _give_up(what: str, error: Exception) -> NoReturn:
    """Say what a user's code raised, and in which line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    raise TargetError(f"{what} {type(error).__name__}: {error}{where}") from error
