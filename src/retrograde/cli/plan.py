"""`retrograde plan`: the fastest plan for a model within a byte budget."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ._ending import FAULT, WRONG_USAGE, draw, fail, telling
from ._target import Target, TargetError, load
from ._threads import Threads, on_threads


def plan(
    target: Annotated[
        str,
        typer.Argument(help="module:factory, or path/to/file.py:factory. **It is run as Python.**", show_default=False),
    ],
    budget: Annotated[str, typer.Option(help="Bytes for a step, such as 2GiB or 500MB.", show_default=False)],
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.", show_default=False)] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Which stack to plan, as encoder.stack, if there are several.", show_default=False),
    ] = None,
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
    from retrograde.planning import parse_size

    try:
        size = parse_size(budget)
        with contextlib.redirect_stdout(sys.stderr), on_threads(threads):  # what a user's code prints is no plan
            found = load(target)
            chosen = _stack(found, stack)
    except (TargetError, ValueError) as error:
        fail(str(error), WRONG_USAGE)
    try:
        with contextlib.redirect_stdout(sys.stderr), on_threads(threads):
            planned, comparison = _planned(found, size, chosen)
    except ValueError as error:
        fail(str(error), FAULT)
    except Exception:  # whatever a user's code raises
        with telling("Cannot plan: a training step raised"):
            raise
    if save is not None:
        _save(planned.plan, save)
    if as_json:
        rows = [asdict(row) for row in comparison.rows]
        told = {"peak": planned.peak, "minimum": planned.minimum, "slowdown": comparison.slowdown, "ways": rows}
        print(json.dumps({**planned.plan.to_dict(), **told}))
    else:
        print(_printable(f"{planned}\n\n{comparison.table()}"))
    if plot is not None:
        draw(comparison, plot)


def _stack(found: Target, name: str | None) -> Any:
    """The stack of this name, which says which one is meant where a model has several."""
    from retrograde._sequence import ReversibleSequence

    if name is None:
        return None
    stacks = {n: m for n, m in found.model.named_modules() if isinstance(m, ReversibleSequence)}
    if name not in stacks:
        raise ValueError(
            f"--stack {name}: the model's ReversibleSequences are {', '.join(map(repr, stacks)) or 'none'}."
        )
    return stacks[name]


def _printable(text: str) -> str:
    """The text with a word for its root sign, where the terminal's encoding has none."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return text.replace("√n     ", "sqrt(n)")  # of the same width
    return text


def _save(plan: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plan.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"--save {path}: {error}", WRONG_USAGE)


def _planned(found: Target, budget: int, stack: Any) -> Any:
    from rich.progress import Progress

    from retrograde.planning import compare, plan

    batch: Any = found.kwargs or found.args
    with Progress(console=_stderr(), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"measuring {what}", completed=done, total=total)

        planned = plan(found.model, batch, budget, loss=found.loss, stack=stack, progress=tell)
        return planned, compare(found.model, batch, planned, loss=found.loss, stack=stack, progress=tell)


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)
