"""The option --threads of the commands that take times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

Threads = Annotated[int | None, typer.Option(min=1, help="Threads on the CPU.", show_default="as torch has")]


@contextmanager
def on_threads(wanted: int | None) -> Iterator[int]:
    """Let torch use so many threads, or as many as it does, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield wanted or before
    finally:
        torch.set_num_threads(before)
