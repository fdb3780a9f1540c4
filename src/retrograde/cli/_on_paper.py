"""Plans on paper on the command line: their options, and what is printed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from retrograde.measure.formatting import format_bytes
from retrograde.measure.targets import TargetError
from retrograde.planning.on_paper import JobPlan, plan_on

from ._ending import FAULT, WRONG_USAGE, draw, ending_on, fail, telling
from ._measuring import progress_bar, write_plan

_PANEL = "For another machine"
On = Annotated[
    str | None,
    typer.Option(
        help="Plan for this device, without allocating anything: a known name such as h100-80gb, a100-80gb or "
        "rtx-4090-24gb (a wrong name lists all), 'this' for this machine, or a JSON file that describes a device.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Ranks = Annotated[int, typer.Option(min=1, help="How many devices train together.", rich_help_panel=_PANEL)]
Shard = Annotated[
    str | None,
    typer.Option(
        help="How the devices share the work: ddp, fsdp2, hsdp, tensor or pipeline.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help="The name of an optimiser in torch.optim.",
        rich_help_panel=_PANEL,
        show_default="that of the factory, or AdamW",
    ),
]
Fused = Annotated[
    bool, typer.Option("--fused", help="Step during the backward pass, as FusedOptimizer does.", rich_help_panel=_PANEL)
]
Precision = Annotated[
    str | None, typer.Option(help="Train under autocast: bf16 or fp16.", rich_help_panel=_PANEL, show_default=False)
]
MicroBatches = Annotated[
    int | None,
    typer.Option(help="Micro-batches per step of a pipeline.", rich_help_panel=_PANEL, show_default="4 per rank"),
]
Stage = Annotated[int, typer.Option(min=0, help="The stage of a pipeline to plan.", rich_help_panel=_PANEL)]


_DEFAULTS = {"ranks": 1, "fused": False, "stage": 0}  # of the options that follow --on; of others None


def refuse_without_on(job: dict[str, Any], wanted: str) -> None:
    """Raise if options were given that mean nothing without a device."""
    given = [f"--{name.replace('_', '-')}" for name, value in job.items() if value != _DEFAULTS.get(name)]
    if given:
        raise ValueError(f"{', '.join(given)} needs --on, the device to {wanted} for.")


def plan_on_paper(
    target: str, budget: str | None, options: dict[str, Any], *, save: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Plan, print, and end with status 1 if nothing fits."""
    sys.path.insert(0, os.getcwd())
    a_step_raised = telling("Cannot plan: a training step raised")
    with a_step_raised, ending_on(TargetError, ValueError), progress_bar() as tell:
        planned = plan_on(options.pop("on"), target, budget=budget, progress=tell, **options)
    if save is not None and planned.unplanned:
        fail(
            f"--save {save}: a plan is for one stack. Choose it with --stack: {', '.join(planned.unplanned)}.",
            WRONG_USAGE,
        )
    if planned.plan is not None:
        write_plan(planned.plan, save)
    print(json.dumps(planned.to_dict()) if as_json else planned)
    draw(planned, plot)
    _end(planned)


def _end(planned: JobPlan) -> None:
    if planned.best is None:
        fail(
            f"Nothing fits {format_bytes(planned.budget)}: the least that a rank needs is "
            f"{format_bytes(planned.minimum)}. Give more ranks, a smaller batch, or --fused.",
            FAULT,
        )
