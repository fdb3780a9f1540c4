"""`retrograde fit`: the largest batch, length or depth that trains under a memory limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from retrograde.planning import _fit, show_size
from retrograde.planning._fit import Trial, TrialError

from ._ending import FAULT, WRONG_USAGE, fail


def fit(
    target: Annotated[
        str,
        typer.Argument(help="module:factory, or path/to/file.py:factory. **It is run as Python.**", show_default=False),
    ],
    memory: Annotated[str, typer.Option(help="The limit, such as 8GiB or 500MB.", show_default=False)],
    vary: Annotated[str, typer.Option(help="What to make larger: batch, length or depth.")] = "batch",
    mode: Annotated[list[str] | None, typer.Option(help="Try this memory mode only; may be given again.")] = None,
    low: Annotated[int, typer.Option(help="The smallest size to try.")] = 1,
    high: Annotated[int, typer.Option(help="The largest size to try.")] = 2**20,
    multiple_of: Annotated[int, typer.Option(help="Try multiples of this number only.")] = 1,
    timeout: Annotated[float, typer.Option(help="The seconds that a trial may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")] = False,
) -> None:
    """Find the largest batch, length or depth that trains under a memory limit.

    The target names a function that takes what is varied by name, and returns the model and a
    batch, and if you like a loss and an optimiser. The file is run as Python, like any script:

        # my_model.py
        def make(batch=8, depth=12):
            model = Net(depth)
            return model, torch.randn(batch, 64)    # or model, batch, loss, optimizer

        retrograde fit my_model.py:make --memory 8GiB
        retrograde fit my_model.py:make --memory 8GiB --vary depth --mode store --mode reverse
        retrograde fit my_package.models:make --memory 500MB --json > fit.json

    Every size is tried in a process of its own, which trains for two steps: with stored
    activations, with checkpoints, and reversing. On the CPU the limit is for the whole process,
    on an accelerator for its memory.

    Exit status: 0 something fits; 1 nothing does, or a trial failed for another reason; 2 wrong usage.
    """
    modes: Any = mode or ("store", "checkpoint", "reverse")
    options: dict[str, Any] = {"vary": vary, "low": low, "high": high, "multiple_of": multiple_of, "timeout": timeout}
    try:
        found = _fit.fit(target, memory_limit=memory, modes=modes, progress=_teller(vary), **options)
    except (ValueError, OSError) as error:
        fail(str(error), WRONG_USAGE)
    except TrialError as error:
        fail(str(error), FAULT)
    print(json.dumps(asdict(found), indent=2) if as_json else found)
    raise typer.Exit(0 if any(each.size is not None for each in found.found) else FAULT)


def _teller(vary: str) -> Callable[[Trial], None]:
    """Shows the trial under way, and each that ended as a line; on the error stream, so that the result stays alone."""
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
        peak = "" if trial.peak is None else f" at {show_size(trial.peak)}"
        console.print(f"{what}: {trial.outcome}{peak} ({trial.seconds:.0f} s)", markup=False)

    return tell
