"""How commands end: a sentence on the error stream, and a status by the usual conventions."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

FAULT, WRONG_USAGE = 1, 2


def fail(message: str, status: int) -> NoReturn:
    """End the command with a sentence for the user."""
    print(message, file=sys.stderr)
    raise typer.Exit(status)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Around a user's code: what it raises ends the command with a sentence, and the line it comes from."""
    try:
        yield
    except Exception as error:  # whatever a user's code raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"({Path(frame.filename).name}, line {frame.lineno})"
        fail(f"{what} {type(error).__name__}: {error} {where}", FAULT)


def draw(drawable: Any, path: Path) -> None:
    """Write a picture, and say where it is."""
    try:
        drawable.plot(path)
    except (ImportError, OSError, ValueError) as error:
        fail(f"--plot {path}: {error}", WRONG_USAGE)
    print(f"The picture is in {path}.", file=sys.stderr)
