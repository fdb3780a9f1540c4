"""What surrounds a measurement in a command: the number of threads, a progress bar, and the file for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from retrograde.measure.timing import Progress
from retrograde.memory import Plan

from ._ending import ending_on


@contextmanager
def on_threads(wanted: int | None) -> Iterator[int]:
    """A context in which torch uses so many threads; None leaves their number unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield wanted or before
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on the error stream that says what is being measured, and goes when the measurement is done."""
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"measuring {what}", completed=done, total=total)

        yield tell


def write_plan(plan: Plan, path: Path | None) -> None:
    """Write a plan as JSON, if there is a path for it."""
    if path is not None:
        with ending_on(OSError, prefix=f"--save {path}: "):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(plan.to_json() + "\n", encoding="utf-8")
