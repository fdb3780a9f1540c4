"""How commands end: a sentence on the error stream, and a status by the usual conventions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

FAULT, WRONG_USAGE = 1, 2


def fail(message: str, status: int) -> NoReturn:
    """End the command with a sentence for the user."""
    print(message, file=sys.stderr)
    raise typer.Exit(status)


def draw(drawable: Any, path: Path) -> None:
    """Write a picture, and say where it is."""
    try:
        drawable.plot(path)
    except (ImportError, OSError, ValueError) as error:
        fail(f"--plot {path}: {error}", WRONG_USAGE)
    print(f"The picture is in {path}.", file=sys.stderr)
