"""`retrograde plan`: the fastest plan for a model within a byte budget."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from retrograde import planning
from retrograde.measure.formatting import parse_size
from retrograde.measure.stacks import the_stack
from retrograde.measure.targets import TargetError, load

from ._ending import FAULT, WRONG_USAGE, draw, ending_on, fail, telling
from ._measuring import on_threads, progress_bar, write_plan
from ._on_paper import (
    Fused,
    MicroBatches,
    On,
    Optimizer,
    Precision,
    Ranks,
    Shard,
    Stage,
    plan_on_paper,
    refuse_without_on,
)
from ._options import Plot, TargetName, Threads


def plan(
    target: TargetName,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory for a training step, such as 2GiB or 500MB; with --on, for all that a device has in memory.",
            show_default="with --on, its memory",
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.", show_default=False)] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="The stack to plan if there are several, such as encoder.stack.", show_default=False),
    ] = None,
    threads: Threads = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and table as JSON, and nothing else.")] = False,
    on: On = None,
    ranks: Ranks = 1,
    shard: Shard = None,
    optimizer: Optimizer = None,
    fused: Fused = False,
    precision: Precision = None,
    micro_batches: MicroBatches = None,
    stage: Stage = 0,
) -> None:
    """Find the fastest memory plan for a model's reversible stack that fits a memory budget.

    The command measures every kind of block once in each memory mode, and whole steps too. It prints the fastest plan
    whose predicted peak fits, and compares it in real steps with storing everything, checkpoints and reversing.
    A mode that needs more memory than is free is predicted and not run. The budget is for everything that a training
    step allocates: activations and the gradients of the parameters.

        # my_model.py
        def make():
            return Net(), torch.randn(8, 64)       # or model, batch, loss

        retrograde plan my_model.py:make --budget 2GiB
        retrograde plan my_model.py:make --budget 500MB --save plan.json

    With --on, nothing is allocated or timed: the step is simulated, bytes are counted per rank, and times are estimated
    from the device's peak compute and bandwidth (a roofline model).

        retrograde plan my_model.py:make --on h100-80gb --ranks 8 --shard fsdp2

    In the training script: `stack.memory = rg.Plan.from_json(Path("plan.json").read_text())`.

    The plan is chosen by counted work, so the same model and batch give the same plan; times are measured. If the real
    step of a plan needs more than the budget, the command fails. It says where prediction and measurement disagree.

    Exit status: 0 a plan fits, also in a real step; 1 no plan fits (the smallest possible budget is named), or the
    model has no stack, or produces NaN; 2 wrong usage; with --on also a model that has no stack,
    or that cannot run without values.
    """
    job = {"ranks": ranks, "shard": shard, "optimizer": optimizer, "fused": fused, "precision": precision}
    job |= {"micro_batches": micro_batches, "stage": stage}
    if on is not None:
        with on_threads(threads):
            plan_on_paper(target, budget, {"on": on, "stack": stack, **job}, save=save, plot=plot, as_json=as_json)
        return
    with ending_on(TargetError, ValueError), on_threads(threads):
        if budget is None:
            raise ValueError("Missing option '--budget': how many bytes a training step may need, such as 2GiB.")
        refuse_without_on(job, "plan")
        size = parse_size(budget)
        loaded = load(target)
        if stack is not None:
            the_stack(loaded.model, stack)
    a_step_raised = telling("Cannot plan: a training step raised")
    with a_step_raised, ending_on(ValueError, status=FAULT), on_threads(threads), progress_bar() as tell:
        options: dict[str, Any] = {"loss": loaded.loss, "stack": stack, "progress": tell}
        planned = planning.plan(loaded.model, loaded.batch, size, **options)
        comparison = None if planned.chain is None else planning.compare(loaded.model, loaded.batch, planned, **options)
    broken = None if comparison is None else comparison.broken_budget()
    if broken is None:
        write_plan(planned.plan, save)
    _show(planned, comparison, as_json=as_json)
    if comparison is not None:
        draw(comparison, plot)
    elif plot is not None:
        fail(f"--plot {plot}: of a compiled model only the plan is measured, and one point is no picture.", WRONG_USAGE)
    if broken is not None:
        fail(broken, FAULT)


def _show(planned: planning.Planned, comparison: planning.Comparison | None, *, as_json: bool) -> None:
    """Print the plan beside what it was compared with. That of a compiled model is measured, not compared."""
    if not as_json:
        print(planned if comparison is None else _printable(f"{planned}\n\n{comparison.table()}"))
        return
    costs: dict[str, Any] = {"peak": planned.peak, "minimum": planned.minimum, "budget": planned.budget}
    if comparison is not None:
        costs["ways"] = [asdict(row) for row in comparison.rows]
        costs |= {"slowdown": comparison.slowdown, "disagreements": comparison.disagreements()}
    print(json.dumps({**planned.plan.to_dict(), **costs}))


def _printable(text: str) -> str:
    """The text, with a word instead of the root sign if the terminal's encoding does not have it."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return text.replace("checkpoint √n     ", "checkpoint sqrt(n)").replace("√n", "sqrt(n)")
    return text
