"""All commands. To add one: write its function in a file of its own here, and put it into COMMANDS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from retrograde import __version__

from ._ending import ending_in_a_sentence
from .bench import bench
from .convert import convert
from .demo import demo
from .doctor import doctor
from .fit import fit
from .plan import plan
from .profile import profile
from .train import train

COMMANDS: tuple[Callable[..., None], ...] = (demo, train, doctor, profile, plan, fit, bench, convert)

app = typer.Typer(
    name="retrograde",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"retrograde {__version__}")
        raise typer.Exit


@app.callback()
def _retrograde(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train deep networks in activation memory that does not grow with depth."""


for _command in COMMANDS:
    app.command()(ending_in_a_sentence(_command))
