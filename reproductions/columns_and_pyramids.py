"""RevCol and RevBiFPN beside twins that are not reversible: accuracy, peak memory and time on the digits.

A twin has the same branches and the same initial weights, but a ReLU after every update, as residual networks have it:
then no step can be undone, and all activations are stored.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report import Kept, Page, Progress, read_options, run, spread, table
from retrograde.couplings import Coupling
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.models import RevBiFPN, RevCol
from training import task_of

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
class Sizes:
    """`steps` of training at the first of the two depths; `rounds` of timed steps."""

    seeds: int
    steps: int
    depths: tuple[int, int]
    rounds: int


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


def step_of(job: Job) -> tuple[Callable[[], None], list[Any]]:
    """A training step without the optimiser, and what it does not allocate: the model with its gradients, the batch."""
    model = build(job)
    images, labels = task_of("digits").batch(64, torch.Generator().manual_seed(0))

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()

    step()  # so that there are gradients to ignore
    return step, [model, images, labels]


def peak(job: Job) -> int:
    """The activations at the peak of a step, in bytes."""
    step, others = step_of(job)
    with MemoryTracker(ignore=others) as tracker:
        step()
    return int(tracker.peak)


def times(name: Name, depth: int, rounds: int) -> dict[str, float]:
    """The least seconds of processor time of a step in each way; the ways take turns."""
    steps = {way: step_of(Job(name, way, 0, depth, 0))[0] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, step in steps.items():
            start = time.process_time()
            step()
            seconds[way].append(time.process_time() - start)
    return {way: min(values) for way, values in seconds.items()}


def quality(name: Name, way: str, sizes: Sizes) -> list[str]:
    """The parameters, the accuracy and the loss over seeds, as they stand in the table."""
    results = [train(Job(name, way, seed, sizes.depths[0], sizes.steps)) for seed in range(sizes.seeds)]
    accuracy, unseen = spread([100 * result.accuracy for result in results], 2), [result.unseen for result in results]
    return [f"{results[0].parameters:,}", accuracy, spread(unseen)]


def rows(name: Name, sizes: Sizes, kept: Kept, progress: Progress) -> list[list[str]]:
    found = {}
    for way in TRAINED:
        found[way] = kept(f"quality: {name}, {way}", functools.partial(quality, name, way, sizes))
        progress.step(f"{name}, {way}")
    found["reversible, stored"] = [found[TRAINED[0]][0], "as reversed", "as reversed"]
    seconds = {
        depth: kept(f"time: {name}, {depth}", functools.partial(times, name, depth, sizes.rounds))
        for depth in sizes.depths
    }
    progress.step(f"{name}, times")
    lines = []
    for way in WAYS:
        peaks = [
            kept(f"peak: {name}, {way}, {depth}", functools.partial(peak, Job(name, way, 0, depth, 0)))
            for depth in sizes.depths
        ]
        milliseconds = [f"{1000 * seconds[depth][way]:.0f}" for depth in sizes.depths]
        lines.append([way, *found[way], *map(format_bytes, peaks), *milliseconds])
    return lines


def main() -> None:
    options = read_options(__doc__, may_time_again=True)
    sizes = Sizes(1, 2, (1, 2), 1) if options.quick else Sizes(3, 120, (4, 16), 5)
    kept = Kept("columns_and_pyramids", options, sizes)
    page = Page("columns_and_pyramids", "Columns and pyramids: RevCol and RevBiFPN", options, kept)
    progress = Progress("networks", len(MODELS) * (len(TRAINED) + 1))
    shallow, deep = sizes.depths
    page.add(
        "RevCol scales each level of a column by learned numbers; RevBiFPN fuses streams of three resolutions. Both "
        "are lists of steps. A twin has the same branches and initial weights with a ReLU after every update, which "
        f"nothing can undo. Trained on scikit-learn's digits (8×8), {sizes.steps} steps of 64, at depth {shallow}; "
        f"{sizes.seeds} seeds, mean ± standard deviation. Peaks (activations, without parameters and their gradients) "
        f"and times per step (processor time, the least of {sizes.rounds} rounds in which the ways take turns) are "
        f"those of depth {shallow} and {deep}."
    )
    for name in MODELS:
        head = ["network", "parameters", "right, %", "loss on unseen digits"]
        head += [f"peak, depth {depth}" for depth in sizes.depths]
        head += [f"ms per step, depth {depth}" for depth in sizes.depths]
        page.add(f"## {name}", table(head, rows(name, sizes, kept, progress)))
    page.write()


if __name__ == "__main__":
    run(main)
