"""The commands, gathered. To add one: write its function in a file of its own here, and put it into COMMANDS."""

from __future__ import annotations

from collections.abc import Callable

import typer

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


@app.callback()
def _retrograde() -> None:
    """Train deep networks in activation memory that does not grow with depth."""


for _command in COMMANDS:
    app.command()(_command)
