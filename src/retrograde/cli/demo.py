"""`retrograde demo`: train a deep model, and show that its memory does not grow with depth."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ._demo_run import FULL, MODES, QUICK, Corpus, Mode, Size, Training
from ._ending import WRONG_USAGE, fail


def demo(
    output: Annotated[Path, typer.Option(help="The folder for the picture, the report and the sample.")] = Path(
        "demo-output"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Run in seconds at small sizes, to check that it works.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="The seed of the weights, the batches and the sample.", min=0, max=2**63 - 1)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
) -> None:
    """Train a 48-block character transformer, and compare memory modes on it. Takes minutes on a CPU.

    The text is the reference documentation that comes with every Python, so nothing is downloaded. The model is
    trained with memory="reverse", then from the same seed with stored activations and with checkpoints. The exact
    coupling makes the losses of all three bit-identical, and the command checks that they are. Then the model
    generates text, and the memory of a step is measured over depth.

        retrograde demo
        retrograde demo --seed 3 --output my-demo
        retrograde demo --quick --json

    The output folder gets demo.png, report.json and sample.txt.

    Exit status: 0 all losses are equal; 1 they are not; 2 wrong usage; 130 interrupted.
    """
    if importlib.util.find_spec("matplotlib") is None:
        fail("The picture needs matplotlib: pip install 'retrograde[cli]'.", WRONG_USAGE)
    try:
        output.mkdir(parents=True, exist_ok=True)
        equal = _demonstrate(QUICK if quick else FULL, output, seed, as_json)
    except OSError as error:
        fail(f"--output {output}: {error.strerror or error}.", WRONG_USAGE)
    raise typer.Exit(0 if equal else 1)


def _demonstrate(size: Size, output: Path, seed: int, as_json: bool) -> bool:
    import torch

    from . import _demo_picture as picture
    from . import _demo_run as work

    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small for several threads
    console = _console(as_json)
    corpus = Corpus()
    console.print(
        f"{len(corpus.numbers):,} characters of Python's reference documentation, {len(corpus.characters)} different "
        f"ones. {size.depth} blocks of width {size.width}, {size.batch} × {size.length} characters per step.\n"
    )
    runs, texts = _trained(corpus, size, seed)
    with console.status("measuring memory over depth …") as status:
        peaks = work.sweep(corpus, size, seed, lambda depth: status.update(f"measuring memory at {depth} blocks …"))
    torch.set_num_threads(threads)
    seconds = time.perf_counter() - began
    console.print("\nGenerated text:")
    for text in texts:
        console.print("  │ " + text.replace("\n", "\n  │ ") + "\n", markup=False, style="italic")
    equal = _conclude(runs, size, console)
    console.print()
    console.print(picture.bars(peaks, size))
    _print_growth(peaks, size, console)
    report = {
        "size": asdict(size), "seed": seed, "torch": torch.__version__, "seconds": seconds, "equal": equal,
        "runs": [run.figures() for run in runs], "depths": size.depths, "peaks": peaks, "samples": texts,
    }  # fmt: skip
    _write(output, report, runs, peaks, size)
    console.print(
        f"\nThe picture is {output / 'demo.png'}; report.json and sample.txt are in the same folder. {seconds:.0f} s."
    )
    if as_json:
        print(json.dumps(report, indent=2))
    return equal


def _console(as_json: bool) -> Any:
    from rich.console import Console

    return Console(stderr=as_json, highlight=False, soft_wrap=True)


def _trained(corpus: Corpus, size: Size, seed: int) -> tuple[list[Training], list[str]]:
    """Train with "reverse" for all steps, and sample from the model; then in the other modes, to compare."""
    from . import _demo_run as work
    from ._bar import Bar

    runs: list[Training] = []
    texts: list[str] = []
    for memory in reversed(MODES):
        steps = size.steps if memory == "reverse" else size.compared
        with Bar(memory, steps) as bar:
            model, run = work.train(corpus, size, memory, steps=steps, seed=seed, on_step=bar.show)
        runs.append(run)
        if memory == "reverse":
            texts = work.sample(model, corpus, size, seed)
    return runs, texts


def _conclude(runs: Sequence[Training], size: Size, console: Any) -> bool:
    """Print the table of the three runs, and whether their losses and weights are equal."""
    from rich import box
    from rich.table import Table

    from retrograde.measure.formatting import format_bytes

    reversing = next(run for run in runs if run.memory == "reverse")
    title = f"{size.depth} blocks, one seed, in each memory mode"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("memory", "peak of a step", "seconds per step", f"loss {size.compared}", "losses and weights"):
        justify: Any = "left" if name in ("memory", "losses and weights") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    different = [run.memory for run in runs if not run.equals(reversing, size.compared)]
    for run in sorted(runs, key=lambda run: MODES.index(run.memory)):
        figures = (format_bytes(run.peak), f"{run.seconds:.3f}", f"{run.losses[size.compared - 1]:.6f}")
        equal = "[bold red]differ[/]" if run.memory in different else "bit-identical"
        table.add_row(run.memory, *figures, "" if run is reversing else equal)
    console.print(table)
    if different:
        console.print(f"The losses of {' and '.join(different)} differ from those of reverse.", style="bold red")
    else:
        console.print(
            f"All {size.compared} losses, and all weights after them, are bit-identical in the three modes: the exact "
            "coupling recomputes the same activations.", style="green",
        )  # fmt: skip
    return not different


def _print_growth(peaks: dict[Mode, list[int]], size: Size, console: Any) -> None:
    growth = ", ".join(f"{memory} × {of_mode[-1] / of_mode[0]:.2f}" for memory, of_mode in peaks.items())
    console.print(f"Memory of {size.depths[-1] / size.depths[0]:g} times as many blocks: {growth}.")


def _write(
    output: Path, report: dict[str, Any], runs: Sequence[Training], peaks: dict[Mode, list[int]], size: Size
) -> None:
    from ._demo_picture import draw

    draw(output / "demo.png", runs, peaks, size)
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (output / "sample.txt").write_text("\n\n".join(report["samples"]) + "\n", encoding="utf-8")
