"""A reversible network and the residual one of the same branches: do equal parameters learn equally well?

Each branch of the residual network adds to one stream; in the reversible one they take turns on two streams. The
initial weights, the data and their order are the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from report import Page, read_options, run, spread, table
from retrograde.measure import MemoryTracker, format_bytes
from training import Run, Trained, build, over_seeds, run_all, task_of, train

NAMES = {"characters": "Character model", "digits": "Digit classifier"}


@dataclass(frozen=True)
class Twins:
    """Two networks of the same branches, trained on each seed."""

    residual: list[Trained]
    reversible: list[Trained]

    def differences(self) -> list[float]:
        """The reversible network's loss on unseen data minus the residual one's, per seed."""
        return [a.unseen - b.unseen for a, b in zip(self.reversible, self.residual, strict=True)]


def base_runs(quick: bool) -> list[Run]:
    if quick:
        return [
            Run("characters", 0, steps=2, width=16, depth=2, batch=2),
            Run("digits", 0, steps=2, width=4, depth=2, batch=8),
        ]
    return [
        Run("characters", 0, steps=300, width=64, depth=6, batch=16),
        Run("digits", 0, steps=300, width=16, depth=6, batch=100),
    ]


def residual_of(base: Run) -> Run:
    return replace(base, network="residual", memory="store")


def reversible_of(base: Run) -> Run:
    return replace(base, network="reversible", memory="reverse")


def peak(chosen: Run) -> int:
    """The bytes of tensors alive at the peak of a step, without parameters and their gradients."""
    model, task = build(chosen), task_of(chosen.task)
    inputs, answers = task.batch(chosen.batch, torch.Generator().manual_seed(0))

    def step() -> None:
        F.cross_entropy(model(inputs).flatten(0, -2), answers.flatten()).backward()

    step()  # so that there are gradients to ignore
    with MemoryTracker(ignore=[model, inputs, answers]) as tracker:
        step()
    return tracker.peak


def train_twins(base: Run, seeds: Sequence[int], *, processes: int) -> Twins:
    runs = [*over_seeds(residual_of(base), seeds), *over_seeds(reversible_of(base), seeds)]
    trained = run_all(train, runs, label=NAMES[base.task], processes=processes)
    return Twins(trained[: len(seeds)], trained[len(seeds) :])


def results(base: Run, twins: Twins) -> str:
    rows = []
    for name, of, trained in (
        ("residual, stored", residual_of, twins.residual),
        ("reversible, reversed", reversible_of, twins.reversible),
    ):
        parameters = {one.parameters for one in trained}
        rows.append(
            [
                name,
                *(f"{count:,}" for count in parameters),
                spread([one.unseen for one in trained]),
                spread([100 * one.accuracy for one in trained], 2),
                format_bytes(peak(of(base))),
            ]
        )
    head = ["network", "parameters", "loss on unseen data", "right, %", "activations at the peak of a step"]
    return table(head, rows)


def verdict(twins: Twins) -> str:
    differences = twins.differences()
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    deviation = statistics.stdev(one.unseen for one in twins.residual)
    word = "above" if mean > 0 else "below"
    return (
        f"Compared per seed, the reversible network's loss is {abs(mean):.4f} {word} the residual one's (standard "
        f"error {error:.4f}); the residual network's own standard deviation over seeds is {deviation:.4f}."
    )


def main() -> None:
    options = read_options(__doc__)
    seeds = range(2) if options.quick else range(8)
    page = Page("reversible_against_residual", "Reversible against residual, at equal parameters", options)
    page.add(
        "Gomez et al. (2017) report that reversible networks reach the accuracy of residual ones of the same size. "
        "Here both consist of the same branches with the same initial weights, trained on the same batches."
    )
    bases = base_runs(options.quick)
    for base in bases:
        twins = train_twins(base, seeds, processes=1 if options.quick else 2)
        page.add(
            f"## {NAMES[base.task]}",
            f"{2 * base.depth} branches of width {base.width}, {base.steps} steps of {base.batch} samples; "
            f"seeds {', '.join(map(str, seeds))}. Mean ± standard deviation over the seeds.",
            results(base, twins),
            verdict(twins),
        )
    page.write()


if __name__ == "__main__":
    run(main)
