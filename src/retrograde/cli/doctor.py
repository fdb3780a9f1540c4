"""`retrograde doctor`: examine a model's reversible stacks on a sample batch."""

from __future__ import annotations

from typing import Annotated

import typer

from retrograde.diagnose import Diagnosis, ExaminationError, examine
from retrograde.measure.targets import TargetError, load

from ._ending import FAULT, WRONG_USAGE, draw, ending_on, fail
from ._options import Plot, TargetName


def doctor(
    target: TargetName,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON, and nothing else.")] = False,
    plot: Plot = None,
    tolerance: Annotated[float, typer.Option(help="The relative error up to which a block is healthy.")] = 1e-3,
) -> None:
    """Examine a model's reversible stacks, block by block, on a sample batch.

    The target names a function without arguments that returns the model, a batch and,
    optionally, a loss. The file is run as Python, like any script:

        # my_model.py
        def make():
            model = Net()
            batch = torch.randn(8, 64)   # or a tuple of arguments, or a dict
            return model, batch          # or model, batch, loss

        retrograde doctor my_model.py:make
        retrograde doctor my_model.py:make --plot drift.png --tolerance 1e-2
        retrograde doctor my_package.models:make --json > diagnosis.json

    It shows for each block how far recomputed activations and gradients are from the true ones,
    what its branches do that a replay must handle, and where memory peaks. If a block is
    past the tolerance, it tries remedies and shows what each of them changed.

    Exit status: 0 healthy; 1 a fault, or a model that cannot be examined; 2 wrong usage,
    or a target that cannot be loaded.
    """
    if not tolerance > 0:
        fail(f"--tolerance {tolerance:g}: give a relative error greater than 0, as in --tolerance 1e-3.", WRONG_USAGE)
    with ending_on(TargetError), ending_on(ExaminationError, status=FAULT, prefix="Cannot examine: "):
        loaded = load(target)
        diagnosis = examine(loaded.model, loaded.batch, loss=loaded.loss, tolerance=tolerance)
    if as_json:
        print(diagnosis.to_json())
    else:
        _show(diagnosis)
    draw(diagnosis, plot)
    raise typer.Exit(0 if diagnosis.healthy else FAULT)


def _show(diagnosis: Diagnosis) -> None:
    """The tables in colour where the terminal has it, then the rest."""
    from rich.console import Console
    from rich.table import Table

    from retrograde.diagnose import _table as text

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        print(diagnosis.table())
        return
    for stack in diagnosis.stacks:
        table = Table(title=text.title(stack), title_justify="left", box=None)
        for i, name in enumerate(text.HEADER):
            table.add_column(name, justify="left" if i in (1, len(text.HEADER) - 1) else "right", no_wrap=True)
        for block, row in zip(stack.blocks, text.rows(stack), strict=True):
            style = "bold red" if block.index == stack.first_bad else "red" if block in stack.past else ""
            table.add_row(*row, style=style)
        console.print(table)
        for line in text.behaviours(stack):
            console.print(f"  {line}", markup=False)
    for line in ("", *text.peaks(diagnosis), "", *text.advice(diagnosis)):
        console.print(line, markup=False)
    console.print(diagnosis.verdict, style="green" if diagnosis.healthy else "bold red", markup=False)
