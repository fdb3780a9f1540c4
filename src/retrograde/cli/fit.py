"""`retrograde fit`: the largest batch, length or depth that trains under a memory limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer

from retrograde.measure.formatting import format_bytes
from retrograde.measure.targets import TargetError
from retrograde.planning import _fit
from retrograde.planning._fit import Trial
from retrograde.planning._trial_process import TrialError

from ._ending import FAULT, ending_on, telling
from ._on_paper import Fused, On, Optimizer, Precision, Ranks, Shard, refuse_without_on
from ._options import TargetName


def fit(
    target: TargetName,
    memory: Annotated[
        str | None,
        typer.Option(help="The limit, such as 8GiB or 500MB.", show_default="with --on, the device's memory"),
    ] = None,
    vary: Annotated[str, typer.Option(help="The size to vary: batch, length or depth.")] = "batch",
    mode: Annotated[list[str] | None, typer.Option(help="Try this memory mode only; may be repeated.")] = None,
    low: Annotated[int, typer.Option(help="The smallest size to try.")] = 1,
    high: Annotated[int, typer.Option(help="The largest size to try.")] = 2**20,
    multiple_of: Annotated[int, typer.Option(help="Try multiples of this number only.")] = 1,
    timeout: Annotated[float, typer.Option(help="The seconds that a trial may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
    on: On = None,
    ranks: Ranks = 1,
    shard: Shard = None,
    optimizer: Optimizer = None,
    fused: Fused = False,
    precision: Precision = None,
) -> None:
    """Find the largest batch, length or depth that trains under a memory limit.

    The target names a function that has the size to vary as an argument, and returns the model, a
    batch and, optionally, a loss and an optimiser. The file is run as Python, like any script:

        # my_model.py
        def make(batch=8, depth=12):
            model = Net(depth)
            # or model, batch, loss, or model, batch, loss, optimizer
            return model, torch.randn(batch, 64)

        retrograde fit my_model.py:make --memory 8GiB
        retrograde fit my_model.py:make --memory 8GiB --vary depth --mode reverse
        retrograde fit my_package.models:make --memory 500MB --json > fit.json

    Every size is tried in a separate process, which trains for two steps: with stored activations,
    with checkpoints, and with reverse, unless --mode names others. On the CPU the limit is for the
    whole process, on an accelerator for its memory.

    With --on, nothing is trained: every step is simulated for the device, and the sizes are predictions:

        retrograde fit my_model.py:make --on a100-80gb --ranks 8 --shard fsdp2

    Exit status: 0 at least one size fits; 1 none does, or a trial failed for another reason; 2 wrong usage; with --on
    also a model that has no stack, or that cannot run without values.
    """
    modes = mode or _fit.DEFAULT_MODES
    options: dict[str, Any] = {"vary": vary, "low": low, "high": high, "multiple_of": multiple_of, "timeout": timeout}
    job = {"ranks": ranks, "shard": shard, "optimizer": optimizer, "fused": fused, "precision": precision}
    a_step_raised = telling("Cannot simulate a training step: it raised") if on is not None else nullcontext()
    with a_step_raised, ending_on(TargetError, ValueError, OSError), ending_on(TrialError, status=FAULT):
        if on is not None:
            options |= {"on": on, **job}
            del options["timeout"]
        elif memory is None:
            raise ValueError("Missing option '--memory': the limit, such as 8GiB.")
        else:
            refuse_without_on(job, "find the sizes")
        result = _fit.fit(target, memory_limit=memory, modes=modes, progress=_teller(vary), **options)
    print(json.dumps(asdict(result), indent=2) if as_json else result)
    raise typer.Exit(0 if any(each.size is not None for each in result.largest) else FAULT)


def _teller(vary: str) -> Callable[[Trial], None]:
    """Shows the current trial, and a line for each that ended, on the error stream: stdout has only the result."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    status = console.status("")

    def tell(trial: Trial) -> None:
        what = f"{trial.memory}, {vary} {trial.size}"
        if trial.outcome == "running":
            status.update(f"{what} …")
            status.start()
            return
        status.stop()
        peak = "" if trial.peak is None else f" at {format_bytes(trial.peak)}"
        console.print(f"{what}: {trial.outcome}{peak} ({trial.seconds:.0f} s)", markup=False)

    return tell
