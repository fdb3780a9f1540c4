"""`retrograde plan`: the fastest plan for a model within a byte budget."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ._ending import FAULT, WRONG_USAGE, draw, fail
from ._target import Target, TargetError, load
from ._threads import Threads, on_threads


def plan(
    target: Annotated[
        str,
        typer.Argument(help="module:factory, or path/to/file.py:factory. **It is run as Python.**", show_default=False),
    ],
    budget: Annotated[str, typer.Option(help="Bytes for a step, such as 2GiB or 500MB.", show_default=False)],
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.", show_default=False)] = None,
    threads: Threads = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture to this file.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and table as JSON, and nothing else.")] = False,
) -> None:
    """Find the fastest plan for a model's reversible stack that fits a byte budget.

    Every kind of block is measured once in each memory mode, and so are whole steps; the fastest plan whose
    predicted peak fits is printed, and run for real beside storing everything, checkpoints and reversing.
    What needs more memory than is free is predicted and not run. The budget is for all tensors that a
    step makes: activations and the parameters' gradients.

        # my_model.py
        def make():
            return Net(), torch.randn(8, 64)       # or model, batch, loss

        retrograde plan my_model.py:make --budget 2GiB
        retrograde plan my_model.py:make --budget 500MB --plot pareto.png --save plan.json

    In the training script: `stack.memory = rg.Plan.from_json(Path("plan.json").read_text())`.

    Exit status: 0 a plan fits; 1 none does (the least budget is named), or there is no stack to plan; 2 wrong usage.
    """
    from retrograde.planning import BudgetError, parse_size

    try:
        size = parse_size(budget)
        with contextlib.redirect_stdout(sys.stderr), on_threads(threads):  # what a user's code prints is no plan
            planned, comparison = _planned(load(target), size)
    except TargetError as error:
        fail(str(error), WRONG_USAGE)
    except BudgetError as error:
        fail(str(error), FAULT)
    except ValueError as error:
        fail(str(error), WRONG_USAGE if "size" in str(error) else FAULT)
    if save is not None:
        save.write_text(planned.plan.to_json() + "\n", encoding="utf-8")
    if as_json:
        rows = [asdict(row) for row in comparison.rows]
        told = {"peak": planned.peak, "minimum": planned.minimum, "slowdown": comparison.slowdown, "ways": rows}
        print(json.dumps({**planned.plan.to_dict(), **told}))
    else:
        print(f"{planned}\n\n{comparison.table()}")
    if plot is not None:
        draw(comparison, plot)


def _planned(found: Target, budget: int) -> Any:
    from rich.progress import Progress

    from retrograde._sequence import ReversibleSequence
    from retrograde.planning import compare, plan

    batch: Any = found.kwargs or found.args
    with Progress(console=_stderr(), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"measuring {what}", completed=done, total=total)

        planned = plan(found.model, batch, budget, loss=found.loss, progress=tell)
        stack = next(m for m in found.model.modules() if isinstance(m, ReversibleSequence))
        return planned, compare(found.model, batch, planned, loss=found.loss, stack=stack, progress=tell)


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)
