"""`retrograde profile`: memory over a step of training, in each memory mode, as a picture and a sentence."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from retrograde.diagnose import ExaminationError

from ._ending import FAULT, WRONG_USAGE, fail
from ._target import TargetError, load


def profile(
    target: Annotated[
        str,
        typer.Argument(help="module:factory, or path/to/file.py:factory. **It is run as Python.**", show_default=False),
    ],
    output: Annotated[Path, typer.Option(help="The folder for memory.png and memory.html.")] = Path("memory-profile"),
    mode: Annotated[list[str] | None, typer.Option(help="Run this memory mode only; may be given again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Show where the memory of a training step goes: over time, block by block, and at its peak.

    The model runs forward and backward in each memory mode, on a sample batch:

        # my_model.py
        def make():
            model = Net()
            tokens = torch.randint(1000, (8, 128))
            return model, tokens, lambda logits: loss(logits, tokens)   # or model, batch

        retrograde profile my_model.py:make
        retrograde profile my_model.py:make --mode reverse --output before
        retrograde profile my_package.models:make --json > memory.json

    It says in a sentence what the peak is ("the peak is the output, not the blocks") and what to do about it, and
    writes a picture (memory.png) and a page (memory.html) into the output folder.

    Exit status: 0 profiled; 1 the model cannot be profiled; 2 wrong usage, or a target that cannot be loaded.
    """
    from retrograde.diagnose._profile import MODES
    from retrograde.diagnose._profile import profile as measure

    known = ("store", "checkpoint", "reverse", "partial", "offload")
    modes: Any = mode or MODES
    unknown = [name for name in modes if name not in known]
    if unknown:
        fail(f"--mode {unknown[0]}: there is {', '.join(known)}.", WRONG_USAGE)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's code prints is not part of the profile
            found = load(target)
            measured = measure(found.model, *found.args, loss=found.loss, modes=modes, **found.kwargs)
    except TargetError as error:
        fail(str(error), WRONG_USAGE)
    except ExaminationError as error:
        fail(f"Cannot profile: {error}", FAULT)
    print(measured.to_json() if as_json else measured.table())
    try:
        output.mkdir(parents=True, exist_ok=True)
        measured.plot(output / "memory.png")
        measured.html(output / "memory.html")
    except (ImportError, OSError) as error:
        fail(f"--output {output}: {error}", WRONG_USAGE)
    print(f"The picture is {output / 'memory.png'}, the page {output / 'memory.html'}.", file=sys.stderr)
