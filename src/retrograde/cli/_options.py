"""The arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TargetName = Annotated[
    str,
    typer.Argument(help="module:factory, or path/to/file.py:factory. **It is run as Python.**", show_default=False),
]
Plot = Annotated[Path | None, typer.Option(help="Write the picture to this file.", show_default=False)]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Threads on the CPU.", show_default="as many as torch uses")
]
