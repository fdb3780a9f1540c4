"""`retrograde bench`: time and memory of a model in each memory mode."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ._bench_picture import Picture, table
from ._bench_run import Bench, Row, Way, own_model, ways_of
from ._ending import FAULT, WRONG_USAGE, draw, fail, telling
from ._target import Target, TargetError, load
from ._threads import Threads, on_threads


def bench(
    target: Annotated[
        str | None,
        typer.Argument(
            help="module:factory, or path/to/file.py:factory. **It is run as Python.** Without one: a small "
            "ReversibleLM of the package.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="How many times each way is timed.")] = 15,
    threads: Threads = None,
    budget: Annotated[
        str | None, typer.Option("--plan", help="Also the fastest plan within this size, as 2GiB.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture to this file.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure time and memory of a model in each memory mode.

    Training steps (forward and backward) run with everything stored, with a checkpoint of every block,
    reversing, reversing on the exact grid where the couplings have one, and partial, in shuffled order
    in one process, round after round:

        # my_model.py
        def make():
            return Net(), torch.randn(8, 64)       # or model, batch, loss

        retrograde bench
        retrograde bench my_model.py:make --rounds 40 --threads 1 --plot time-and-memory.png
        retrograde bench my_model.py:make --plan 2GiB --json > bench.json

    Time is a ratio to storing, taken round by round: the median, and the quartiles beside it. The peak is
    the bytes of all tensors that a step makes, the gradients of parameters among them.

    This is about your model. retrograde beside RevTorch, MemCNN and others is `make bench` in the repository.

    Exit status: 0 measured; 1 the model cannot be measured, or no plan fits; 2 wrong usage, or a target that cannot
    be loaded.
    """
    from retrograde.planning import BudgetError, parse_size

    try:
        size = None if budget is None else parse_size(budget)
        with contextlib.redirect_stdout(sys.stderr):  # what a user's code prints is not part of the figures
            found = own_model() if target is None else load(target)
    except (TargetError, ValueError) as error:
        fail(str(error), WRONG_USAGE)
    try:
        with contextlib.redirect_stdout(sys.stderr), on_threads(threads) as number:
            rows, refused = _measured(found, rounds, size)
    except (BudgetError, ValueError) as error:
        fail(f"Cannot measure: {error}", FAULT)
    machine = {"torch": torch.__version__, "threads": number, "device": _device(found), "rounds": rounds}
    title = f"{found.name}: {machine['device']}, {number} thread{'s' * (number > 1)}, {rounds} rounds"
    if as_json:
        print(json.dumps({"model": found.name, **machine, "ways": [asdict(row) for row in rows], "left_out": refused}))
    else:
        _show(rows, title)
    for sentence in refused:
        print(sentence, file=sys.stderr)
    if plot is not None:
        draw(Picture(rows, title), plot)


def _measured(found: Target, rounds: int, budget: int | None) -> tuple[list[Row], list[str]]:
    from rich.console import Console
    from rich.progress import Progress

    from retrograde._sequence import ReversibleSequence
    from retrograde.planning import plan
    from retrograde.planning._steps import mean_square

    stacks = [module for module in found.model.modules() if isinstance(module, ReversibleSequence)]
    if not stacks:
        raise ValueError(
            f"{type(found.model).__name__} contains no retrograde.ReversibleSequence. retrograde convert "
            f"{found.name} shows what making its layers reversible would do."
        )
    with telling("Cannot measure: a training step raised"):
        (found.loss or mean_square)(found.model(*found.args, **found.kwargs)).backward()
        found.model.zero_grad()
    batch: Any = found.kwargs or found.args
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"measuring {what}", completed=done, total=total)

        ways = ways_of(stacks)
        if budget is not None:
            planned = plan(found.model, batch, budget, loss=found.loss, progress=tell)
            ways.append(Way("plan", {stacks[0]: planned.plan}))
        return Bench(found, stacks).measure(ways, rounds, tell)


def _device(found: Target) -> str:
    return next((parameter.device.type for parameter in found.model.parameters()), "cpu")


def _show(rows: list[Row], title: str) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # a file has no edge at which columns would be cut
    console.print(table(rows, title))
    for row in rows:
        if row.name == "plan":
            console.print(f"The plan: {row.plan}", markup=False)
