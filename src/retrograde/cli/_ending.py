"""How commands end: a table or a picture, or a sentence on the error stream and a status by the usual conventions."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import typer

from ._starting import raise_as_usual

FAULT, WRONG_USAGE, INTERRUPTED = 1, 2, 130
_TRACEBACK = "RETROGRADE_TRACEBACK"  # an environment variable: show where an unforeseen error comes from
UNFORESEEN = "This is a fault of retrograde"


def fail(message: str, status: int) -> NoReturn:
    """End the command with a sentence for the user."""
    print(message, file=sys.stderr)
    raise typer.Exit(status)


@contextmanager
def ending_on(*errors: type[Exception], status: int = WRONG_USAGE, prefix: str = "") -> Iterator[None]:
    """Around the work of a command: these errors end it with their sentence.

    What a user's code prints goes to the error stream: it is not part of the result.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except errors as error:
        fail(f"{prefix}{error}", status)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Around a user's code: what it raises ends the command with a sentence, and the line it comes from."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except typer.Exit:  # a sentence was printed already
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's code raises
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))  # which branch and block, for one
        fail(f"{what} {type(error).__name__}: {error} ({_place(error)}){notes}", FAULT)


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def ending_in_a_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """A command that ends with one line when it is interrupted, and when something happens that nobody foresaw."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if isinstance(value, (str, Path)) and "\0" in str(value):
                fail(f"{name}: {str(value)!r} contains a NUL character, which no name or path can.", WRONG_USAGE)
        try:
            raise_as_usual()
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            fail("Stopped.", INTERRUPTED)
        except BrokenPipeError:  # the reader of a pipe has gone
            raise
        except Exception as error:
            if os.environ.get(_TRACEBACK):
                raise
            fail(
                f"retrograde {command.__name__}: {type(error).__name__}: {error} ({_place(error)}). {UNFORESEEN}: "
                f"please report it, with what {_TRACEBACK}=1 in the environment shows.",
                FAULT,
            )

    return run


def show(table: Any, lines: Iterable[str]) -> None:
    """Print a table in colour where the terminal has it, and lines below it."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 1000  # a file has no edge at which columns would be cut
    console.print(table)
    for line in lines:
        console.print(line, markup=False)


def draw(drawable: Any, path: Path | None) -> None:
    """Write a picture, if there is a path for it, and say where it is."""
    if path is not None:
        with ending_on(ImportError, OSError, ValueError, prefix=f"--plot {path}: "):
            drawable.plot(path)
        print(f"The picture is in {path}.", file=sys.stderr)
