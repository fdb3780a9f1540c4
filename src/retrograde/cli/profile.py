"""`retrograde profile`: memory over a training step, in each memory mode, as a picture and a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from retrograde import diagnose
from retrograde.diagnose._profile import DEFAULT_MODES
from retrograde.measure.targets import TargetError, load
from retrograde.memory import MODES
from retrograde.network.choices import check_choice

from ._ending import FAULT, ending_on
from ._options import TargetName


def profile(
    target: TargetName,
    output: Annotated[Path, typer.Option(help="The folder for memory.png and memory.html.")] = Path("memory-profile"),
    mode: Annotated[
        list[str] | None, typer.Option(help="Run only this memory mode; give the option several times for several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Show where the memory of a training step goes: over time, block by block, and at its peak.

    The model runs forward and backward in each memory mode, on a sample batch:

        # my_model.py
        def make():
            model = Net()
            tokens = torch.randint(1000, (8, 128))
            # or model, batch
            return model, tokens, lambda logits: loss(logits, tokens)

        retrograde profile my_model.py:make
        retrograde profile my_model.py:make --mode reverse --output before
        retrograde profile my_package.models:make --json > memory.json

    It says in a sentence what the peak is ("the peak is the output, not the blocks") and what to do about it, and
    writes a picture (memory.png) and a page (memory.html) into the output folder.

    Exit status: 0 profiled; 1 the model cannot be profiled; 2 wrong usage, or a target that cannot be loaded.
    """
    with ending_on(TargetError, ValueError):
        for name in mode or ():
            check_choice("--mode", name, MODES)
        loaded = load(target)
    with ending_on(diagnose.ExaminationError, status=FAULT, prefix="Cannot profile: "):
        measured = diagnose.profile(loaded.model, loaded.batch, modes=mode or DEFAULT_MODES, loss=loaded.loss)
    print(measured.to_json() if as_json else measured.table())
    with ending_on(ImportError, OSError, prefix=f"--output {output}: "):
        output.mkdir(parents=True, exist_ok=True)
        measured.plot(output / "memory.png")
        measured.html(output / "memory.html")
    print(f"The picture is {output / 'memory.png'}, the page {output / 'memory.html'}.", file=sys.stderr)
