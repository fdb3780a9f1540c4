"""Training on the exact grid: as good as without it, and bit-identical with reversed and with stored activations.

A character model and a digit classifier (with batch norm) are trained on every seed without a grid, on a
grid of 2^-16 and on one of 2^-12, each with stored and with reversed activations.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from report import Options, Page, read_options, run, spread, table
from training import Run, TaskName, Trained, TrainingMemory, over_seeds, run_all, train

GRIDS = (None, 16, 12)
MODES: tuple[TrainingMemory, ...] = ("store", "reverse")
NAMES: dict[TaskName, str] = {"characters": "Character model", "digits": "Digit classifier"}


def base_runs(quick: bool) -> dict[TaskName, Run]:
    if quick:
        return {
            "characters": Run("characters", 0, steps=4, width=16, depth=3, batch=2),
            "digits": Run("digits", 0, steps=4, width=4, depth=3, batch=8),
        }
    return {
        "characters": Run("characters", 0, steps=200, width=64, depth=6, batch=16),
        "digits": Run("digits", 0, steps=240, width=16, depth=4, batch=100),
    }


def variants(base: Run, seeds: Sequence[int]) -> list[Run]:
    """Every seed with every grid, stored and reversed; and the character model's first seed in bf16 as well."""
    runs = [
        seeded
        for bits in GRIDS
        for memory in MODES
        for seeded in over_seeds(replace(base, bits=bits, memory=memory), seeds)
    ]
    if base.task == "characters":
        low = replace(base, precision="bf16 autocast")
        runs += [replace(low, bits=bits, memory=memory) for bits in GRIDS[:2] for memory in MODES]
    return runs


def first_difference(these: Sequence[float], those: Sequence[float]) -> int | None:
    """The first step, counted from 1, at which two loss curves differ in any bit."""
    return next((i for i, (a, b) in enumerate(zip(these, those, strict=True), 1) if a != b), None)


def grid_name(bits: int | None) -> str:
    return "none" if bits is None else f"2^-{bits}"


def quality(base: Run, trained_by_run: dict[Run, Trained], seeds: Sequence[int]) -> str:
    """The loss on unseen data compared with the twin without a grid. Runs on a grid are the reversed ones."""
    twins = [trained_by_run[replace(base, seed=seed)] for seed in seeds]
    rows = []
    for bits in GRIDS:
        memory: TrainingMemory = "store" if bits is None else "reverse"
        runs = [trained_by_run[replace(base, seed=seed, bits=bits, memory=memory)] for seed in seeds]
        differences = [run.unseen - twin.unseen for run, twin in zip(runs, twins, strict=True)]
        row = [grid_name(bits), memory, spread([r.unseen for r in runs])]
        row += [spread([100 * r.accuracy for r in runs], 2)]
        row += ["–", "–"] if bits is None else [above(differences), within(differences, twins)]
        rows.append(row)
    head = ["grid", "activations", "loss on unseen data", "right, %", "loss above its twin's", "within the spread"]
    return table(head, rows)


def above(differences: Sequence[float]) -> str:
    """Mean and standard deviation of differences that may be far smaller than the printed digits of the losses."""
    return f"{statistics.mean(differences):+.1e} ± {statistics.stdev(differences):.1e}"


def within(differences: Sequence[float], twins: Sequence[Trained]) -> str:
    """Whether the mean difference is smaller than the twins' standard deviation over seeds."""
    deviation = statistics.stdev(twin.unseen for twin in twins)
    answer = "yes" if abs(statistics.mean(differences)) <= deviation else "no"
    return f"{answer} ({abs(statistics.mean(differences)) / deviation:.1g} of it)"


def bits_row(stored: Sequence[Trained], reversed_: Sequence[Trained]) -> list[str]:
    """Reversed compared with stored activations, per seed."""
    pairs = list(zip(stored, reversed_, strict=True))
    steps = [first_difference(s.losses, r.losses) for s, r in pairs]
    largest = max(abs(s.unseen - r.unseen) for s, r in pairs)
    same = sum(s.digest == r.digest for s, r in pairs)
    differing = ", ".join("none" if step is None else str(step) for step in steps)
    return [differing, f"{same} of {len(pairs)}", f"{largest:.1e}" if largest else "0"]


def same_bits(base: Run, trained_by_run: dict[Run, Trained], seeds: Sequence[int]) -> str:
    rows = []
    for precision in ("float32", "bf16 autocast"):
        for bits in GRIDS:
            kind = replace(base, precision=precision, bits=bits)
            done = [seed for seed in seeds if replace(kind, seed=seed) in trained_by_run]
            if done:
                stored, reversed_ = (
                    [trained_by_run[replace(kind, seed=seed, memory=memory)] for seed in done] for memory in MODES
                )
                rows.append([precision, grid_name(bits), *bits_row(stored, reversed_)])
    head = [
        "branches",
        "grid",
        "first step whose loss differs",
        "same parameters and buffers at the end",
        "unseen loss",
    ]
    return table(head, rows)


def describe(base: Run, parameters: int, seeds: Sequence[int]) -> str:
    return (
        f"{base.depth} blocks of width {base.width}, {parameters:,} parameters, {base.steps} steps of {base.batch} "
        f"samples; seeds {', '.join(map(str, seeds))} (weights and order of the data). Mean ± standard deviation over "
        "the seeds."
    )


def main() -> None:
    options: Options = read_options(__doc__)
    seeds = range(2) if options.quick else range(5)
    page = Page("exact_training", "Training with exact couplings", options)
    page.add(
        "On a grid the update of a stream is rounded to multiples of 2^-bits. Does the model learn as well? And is "
        "training with reversed activations bit-identical to training with stored ones? The twin of a run is the model "
        "of the same seed without a grid and with stored activations."
    )
    for task, base in base_runs(options.quick).items():
        runs = variants(base, seeds)
        trained = run_all(train, runs, label=NAMES[task], processes=1 if options.quick else 2)
        trained_by_run = dict(zip(runs, trained, strict=True))
        page.add(
            f"## {NAMES[task]}", describe(base, trained[0].parameters, seeds), quality(base, trained_by_run, seeds)
        )
        page.add(
            "Reversed compared with stored, per seed; the last column is the largest difference of the loss on unseen "
            "data:",
            same_bits(base, trained_by_run, seeds),
        )
    page.write()


if __name__ == "__main__":
    run(main)
