"""RevCol and RevBiFPN beside twins that are not reversible: accuracy, peak memory and time on the digits.

A twin has the same branches and the same initial weights, but a ReLU after every update, as residual networks have it:
then no step can be undone, and all activations are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report import Page, read_options, run, spread, table
from retrograde.couplings import Coupling
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.models import RevBiFPN, RevCol
from training import run_all, task_of

Name = Literal["RevCol", "RevBiFPN"]
MODELS: dict[Name, Callable[..., nn.Module]] = {"RevCol": RevCol, "RevBiFPN": RevBiFPN}
WAYS = {"twin, stored": "store", "reversible, stored": "store", "reversible, reversed": "reverse"}

TRAINED = ("twin, stored", "reversible, reversed")  # stored and reversed activations differ by rounding only


@dataclass(frozen=True)
class Rectified(Coupling):
    """Another coupling, followed by a ReLU, which forgets the sign of what it gets."""

    inner: Coupling
    invertible = False

    def combine(self, target: Tensor, update: Any) -> Tensor:
        return F.relu(self.inner.combine(target, update))

    def separate(self, combined: Tensor, update: Any) -> Tensor:
        raise TypeError("A ReLU cannot be undone.")

    def why_not(self, target: Tensor, update: Any) -> str | None:
        return self.inner.why_not(target, update)


@dataclass(frozen=True)
class Job:
    """A training run; `depth` are the columns or the stages."""

    name: Name
    way: str
    seed: int
    depth: int
    steps: int

    def __str__(self) -> str:
        return f"{self.name}, {self.way}, depth {self.depth}, seed {self.seed}"


@dataclass(frozen=True)
class Trained:
    accuracy: float
    unseen: float
    parameters: int


def build(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    model = MODELS[job.name](10, (16, 24, 32), job.depth, channels=1, memory=WAYS[job.way])
    if job.way.startswith("twin"):
        stack: Any = model.stack
        for block in stack:
            for step in block.each_step():
                step.couple(Rectified(step.coupling))
        stack.memory = "store"
    return model


def train(job: Job) -> Trained:
    """Train with AdamW and a one-cycle rate, and evaluate on unseen digits."""
    task, model = task_of("digits"), build(job)
    generator = torch.Generator().manual_seed(1000 + job.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=job.steps + 1)
    for _ in range(job.steps):
        images, labels = task.batch(64, generator)
        optimiser.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()
    (images, labels), parameters = next(iter(task.unseen())), sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        logits = model(images)
    return Trained(
        (logits.argmax(-1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item(), parameters
    )


def measure(job: Job, rounds: int) -> tuple[int, float]:
    """The activations at the peak of a step in bytes, and the least seconds of a step."""
    model = build(job)
    images, labels = task_of("digits").batch(64, torch.Generator().manual_seed(0))

    def step() -> float:
        start = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        return time.perf_counter() - start

    step()  # so that there are gradients to ignore
    with MemoryTracker(ignore=[model, images, labels]) as tracker:
        step()
    return tracker.peak, min(step() for _ in range(rounds))


def rows(name: Name, depths: tuple[int, int], steps: int, seeds: range, rounds: int) -> list[list[str]]:
    jobs = [Job(name, way, seed, depths[0], steps) for way in TRAINED for seed in seeds]
    trained = run_all(train, jobs, label=name, processes=1)
    lines = []
    for way in WAYS:
        results = [result for job, result in zip(jobs, trained, strict=True) if job.way == way]
        scores = [
            spread([100 * result.accuracy for result in results], 2) if results else "as reversed",
            spread([result.unseen for result in results]) if results else "as reversed",
        ]
        measured = [measure(Job(name, way, 0, depth, steps), rounds) for depth in depths]
        lines.append(
            [
                way,
                f"{trained[0].parameters:,}",
                *scores,
                *(format_bytes(peak) for peak, _ in measured),
                *(f"{1000 * seconds:.0f}" for _, seconds in measured),
            ]
        )
    return lines


def main() -> None:
    options = read_options(__doc__)
    seeds, steps, depths, rounds = (range(1), 2, (1, 2), 1) if options.quick else (range(3), 120, (4, 16), 5)
    page = Page("columns_and_pyramids", "Columns and pyramids: RevCol and RevBiFPN", options)
    page.add(
        "RevCol scales each level of a column by learned numbers; RevBiFPN fuses streams of three resolutions. Both "
        "are lists of steps. A twin has the same branches and initial weights with a ReLU after every update, which "
        f"nothing can undo. Trained on scikit-learn's digits (8×8), {steps} steps of 64, at depth {depths[0]}; "
        f"seeds {', '.join(map(str, seeds))}, mean ± standard deviation. Peaks (activations, without parameters and "
        f"their gradients) and times per step are those of depth {depths[0]} and {depths[1]}."
    )
    for name in MODELS:
        head = ["network", "parameters", "right, %", "loss on unseen digits"]
        head += [f"peak, depth {depth}" for depth in depths] + [f"ms per step, depth {depth}" for depth in depths]
        page.add(f"## {name}", table(head, rows(name, depths, steps, seeds, rounds)))
    page.write()


if __name__ == "__main__":
    run(main)
