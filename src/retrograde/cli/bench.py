"""`retrograde bench`: time and memory of a model in each memory mode."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from retrograde.measure.finite import UnmeasurableError, check_step
from retrograde.measure.formatting import format_bytes, parse_size
from retrograde.measure.stacks import stacks_of
from retrograde.measure.targets import Target, TargetError, load
from retrograde.planning import Planned, plan
from retrograde.planning._compare import differ

from ._bench_picture import PLAN, Picture, legend, table
from ._bench_run import Row, Way, default_target, measure, ways_of
from ._ending import FAULT, draw, ending_on, show, telling
from ._measuring import on_threads, progress_bar
from ._options import Plot, Threads


def bench(
    target: Annotated[
        str | None,
        typer.Argument(
            help="module:factory, or path/to/file.py:factory. **It is run as Python.** Without a target, a small "
            "ReversibleLM of the package is measured.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="How many times each mode is timed.")] = 15,
    threads: Threads = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--plan", help="Also measure the fastest plan within this size, such as 2GiB.", show_default=False
        ),
    ] = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure time and memory of a model in each memory mode.

    Training steps (forward and backward) run in the modes store, checkpoint, reverse and selective, and in reverse
    on the exact grid if the couplings have one. The modes are interleaved in one process: they run in a new random
    order in every round.

        # my_model.py
        def make():
            return Net(), torch.randn(8, 64)       # or model, batch, loss

        retrograde bench
        retrograde bench my_model.py:make --rounds 40 --plot bench.png
        retrograde bench my_model.py:make --plan 2GiB --json > bench.json

    Time is the ratio to store in the same round: its median, and its quartiles. The peak is the bytes of all
    tensors that a training step allocates, including the gradients of the parameters.

    This command measures your model. `make bench` in the repository compares retrograde with RevTorch, MemCNN and
    others.

    Exit status: 0 measured; 1 the model cannot be measured (it makes NaN, for example), or no plan fits; 2 wrong
    usage, or a target that cannot be loaded.
    """
    with ending_on(TargetError, ValueError):
        size = None if budget is None else parse_size(budget)
        loaded = default_target() if target is None else load(target)
    with ending_on(ValueError, status=FAULT, prefix="Cannot measure: "), on_threads(threads) as number:
        rows, refusals = _measure(loaded, rounds, size)
    device = next((parameter.device.type for parameter in loaded.model.parameters()), "cpu")
    machine = {"torch": torch.__version__, "threads": number, "device": device, "rounds": rounds}
    title = f"{loaded.name}: {device}, {number} thread{'s' * (number > 1)}, {rounds} rounds"
    if as_json:
        ways = [asdict(row) for row in rows]
        print(json.dumps({"model": loaded.name, **machine, "ways": ways, "left_out": refusals}))
    else:
        show(table(rows, title), legend(rows))
    for sentence in refusals:
        print(sentence, file=sys.stderr)
    draw(Picture(rows, title), plot)


def _measure(target: Target, rounds: int, budget: int | None) -> tuple[list[Row], list[str]]:
    stacks = list(stacks_of(target.model).values())
    cannot = "Cannot measure: "
    with telling(f"{cannot}a training step raised"), ending_on(UnmeasurableError, status=FAULT, prefix=cannot):
        check_step(target.model, target.batch, target.loss)
    ways = ways_of(stacks)
    with progress_bar() as tell:
        if budget is None:
            return measure(target, ways, rounds, tell)
        planned = plan(target.model, target.batch, budget, loss=target.loss, progress=tell)
        ways.append(Way(PLAN, {stacks[0]: planned.plan}, ways[0].on_grid))
        rows, refusals = measure(target, ways, rounds, tell)
    return rows, [*refusals, *_about_the_plan(planned, rows[-1].peak)]


def _about_the_plan(planned: Planned, peak: int) -> Iterator[str]:
    """Where the plan's prediction and its measurement disagree."""
    if planned.budget is not None and peak > planned.budget:
        raise ValueError(
            f"the plan breaks its budget. A step under it peaked at {format_bytes(peak)}, over "
            f"{format_bytes(planned.budget)}: the model does something else in each step."
        )
    if differ(peak, planned.peak):
        predicted = f"{format_bytes(peak)}, where {format_bytes(planned.peak)} was predicted"
        yield f"The plan: prediction and measurement disagree. The peak is {predicted}."
