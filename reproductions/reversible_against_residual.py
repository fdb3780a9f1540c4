"""A reversible transformer and its residual twin, at equal parameters and at equal compute, on language and images.

Both consist of the same branches: pre-norm attention and feed-forward with RMSNorm, rotary positions and SwiGLU. In the
residual network each branch adds to one stream; in the reversible one they take turns on two. Initial weights, data and
their order are the same. Recomputing makes a step of the reversible network cost 4/3 of the products, so for equal
compute the residual network gets 4/3 of the steps.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from report import Kept, Page, Progress, read_options, run, spread, table
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.measure.pictures import style_of
from training import Run, build, task_of, train

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

NAMES = {"characters": "Language model", "digits": "Image classifier"}
RESIDUAL, CHECKPOINTED, LONGER = "residual, stored", "residual, checkpointed", "residual, stored, 4/3 of the steps"
REVERSIBLE, DEEPER = "reversible, reversed", "reversible, reversed, twice the depth"
TRAINED = (RESIDUAL, LONGER, REVERSIBLE, DEEPER)
DEPTHS = (1, 2, 4)
"""Multiples of the depth, of which the peak is measured."""


def base_runs(quick: bool) -> list[Run]:
    if quick:
        return [
            Run("characters", 0, steps=3, width=16, depth=2, batch=2, parts="modern"),
            Run("digits", 0, steps=3, width=16, depth=2, batch=8, parts="modern"),
        ]
    return [
        Run("characters", 0, steps=200, width=48, depth=6, batch=12, parts="modern"),
        Run("digits", 0, steps=150, width=48, depth=6, batch=32, parts="modern"),
    ]


def network(name: str, base: Run) -> Run:
    """What is trained under a name."""
    kind = replace(base, network="residual" if name.startswith("residual") else "reversible")
    memory = {CHECKPOINTED: "checkpoint", REVERSIBLE: "reverse", DEEPER: "reverse"}.get(name, "store")
    steps = round(base.steps * 4 / 3) if name == LONGER else base.steps
    return replace(kind, memory=memory, steps=steps, depth=base.depth * (2 if name == DEEPER else 1))  # type: ignore[arg-type]


def trained(chosen: Run) -> dict[str, Any]:
    result = asdict(train(chosen))
    return {part: result[part] for part in ("unseen", "accuracy", "parameters")}


def step_of(chosen: Run) -> tuple[Callable[[], None], Any]:
    """A training step without the optimiser, and what it does not allocate: the model with its gradients, the batch."""
    model, task = build(chosen), task_of(chosen.task)
    inputs, answers = task.batch(chosen.batch, torch.Generator().manual_seed(0))

    def step() -> None:
        F.cross_entropy(model(inputs).flatten(0, -2), answers.flatten()).backward()

    step()  # so that there are gradients to ignore
    return step, [model, inputs, answers]


def peak(chosen: Run) -> int:
    """The bytes of tensors alive at the peak of a step, without parameters and their gradients."""
    step, others = step_of(chosen)
    with MemoryTracker(ignore=others) as tracker:
        step()
    return int(tracker.peak)


def products(chosen: Run) -> int:
    """The floating-point operations of all matrix products of a training run."""
    step, _ = step_of(chosen)
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() * chosen.steps


def times(base: Run, rounds: int) -> dict[str, float]:
    """Processor time of a step as a ratio to the residual network with stored activations: medians over rounds."""
    steps = {name: step_of(network(name, base))[0] for name in (RESIDUAL, CHECKPOINTED, REVERSIBLE)}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        seconds = {}
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name] = time.process_time() - start
        for name in steps:
            ratios[name].append(seconds[name] / seconds[RESIDUAL])
    return {name: statistics.median(values) for name, values in ratios.items()}


def results(base: Run, found: Found) -> str:
    rows = []
    for name in (RESIDUAL, CHECKPOINTED, LONGER, REVERSIBLE, DEEPER):
        of = [seed[RESIDUAL if name == CHECKPOINTED else name] for seed in found.seeds]  # the same values, recomputed
        rows.append(
            [
                name,
                network(name, base).steps,
                f"{found.work[name] / found.work[REVERSIBLE]:.2f}",
                f"{of[0]['parameters']:,}",
                spread([one["unseen"] for one in of]),
                spread([100 * one["accuracy"] for one in of], 2),
                format_bytes(found.peaks[name]),
            ]
        )
    head = ["network", "steps", "compute", "parameters", "loss on unseen data", "right, %", "peak"]
    return table(head, rows)


def compared(seeds: list[dict[str, Any]], name: str, other: str) -> str:
    differences = [seed[name]["unseen"] - seed[other]["unseen"] for seed in seeds]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return f"{abs(mean):.4f} {'above' if mean > 0 else 'below'} it (standard error {error:.4f})"


def verdict(found: Found) -> str:
    seeds, ratios = found.seeds, found.ratios
    deviation = statistics.stdev([seed[RESIDUAL]["unseen"] for seed in seeds])
    return (
        "Loss of the reversible network compared per seed with the residual one. Equal parameters and steps: "
        f"{compared(seeds, REVERSIBLE, RESIDUAL)}. Equal parameters and compute: "
        f"{compared(seeds, REVERSIBLE, LONGER)}. At twice the depth, in the same memory, and with as many steps: "
        f"{compared(seeds, DEEPER, RESIDUAL)}. The residual network's own standard deviation over seeds is "
        f"{deviation:.4f}. Processor time of a step, as a ratio to the residual network with stored activations: "
        f"checkpointed {ratios[CHECKPOINTED]:.2f}, reversed {ratios[REVERSIBLE]:.2f}."
    )


def draw(axes: Sequence[Axes], all_peaks: dict[str, dict[str, list[int]]], depth: int) -> None:
    for ax, (title, peaks) in zip(axes, all_peaks.items(), strict=True):
        for name, values in peaks.items():
            colour, marker = style_of({RESIDUAL: "store", CHECKPOINTED: "checkpoint", REVERSIBLE: "reverse"}[name])
            ax.plot(
                [depth * times for times in DEPTHS], [value / 2**20 for value in values],
                marker=marker, color=colour, label=name,
            )  # fmt: skip
        ax.set(title=title, xlabel="blocks", ylabel="activations at the peak of a step, MiB")
        ax.set_xticks([depth * times for times in DEPTHS])
        ax.set_ylim(bottom=0)
        ax.legend()


@dataclass(frozen=True)
class Found:
    """By name of a network: the results of training per seed, bytes, products and times."""

    seeds: list[dict[str, Any]]
    peaks: dict[str, int]
    by_depth: dict[str, list[int]]
    work: dict[str, int]
    ratios: dict[str, float]


def measure(base: Run, seeds: range, rounds: int, kept: Kept) -> Found:
    task = NAMES[base.task]
    progress = Progress(task, len(seeds) * len(TRAINED) + 1)
    found: list[dict[str, Any]] = [{} for _ in seeds]
    for seed in seeds:
        for name in TRAINED:
            chosen = replace(network(name, base), seed=seed)
            found[seed][name] = kept(f"{task}, {name}, seed {seed}", functools.partial(trained, chosen))
            progress.step(f"{name}, seed {seed}: {found[seed][name]['unseen']:.4f}")

    def measured(function: Callable[[Run], int], name: str, times_deeper: int = 1) -> int:
        chosen = network(name, base)
        chosen = replace(chosen, depth=times_deeper * chosen.depth)
        key = f"{function.__name__}: {task}, {name}, {chosen.depth} blocks"
        return int(kept(key, functools.partial(function, chosen)))

    names = (*TRAINED, CHECKPOINTED)
    results = Found(
        found,
        {name: measured(peak, name) for name in names},
        {name: [measured(peak, name, n) for n in DEPTHS] for name in (RESIDUAL, CHECKPOINTED, REVERSIBLE)},
        {name: measured(products, name) for name in names},
        kept(f"time: {task}", functools.partial(times, base, rounds)),
    )
    progress.step("memory and time")
    return results


def main() -> None:
    options = read_options(__doc__, may_time_again=True)
    seeds, rounds = (range(2), 1) if options.quick else (range(5), 25)
    bases = base_runs(options.quick)
    kept = Kept("reversible_against_residual", options, bases)
    title = "Reversible against residual, at equal parameters and equal compute"
    page = Page("reversible_against_residual", title, options, kept)
    page.add(INTRODUCTION)
    by_depth: dict[str, dict[str, list[int]]] = {}
    for base in bases:
        found = measure(base, seeds, rounds, kept)
        by_depth[NAMES[base.task]] = found.by_depth
        room = found.peaks[RESIDUAL] / found.peaks[REVERSIBLE]
        page.add(
            f"## {NAMES[base.task]}",
            f"{base.depth} blocks of width {base.width}, {base.steps} steps of {base.batch} samples; "
            f"seeds {', '.join(map(str, seeds))}.",
            results(base, found),
            verdict(found),
            f"At the residual network's peak, the reversible one has room for about {room:.1f} times the batch, or for "
            "any depth.",
        )
    page.add("## Memory by depth")
    page.draw(lambda axes: draw(axes, by_depth, bases[0].depth), panels=2)
    page.add(LIMITS)
    page.write()


INTRODUCTION = """\
An objection to reversible layers is that no competitive architecture uses them. Here a pre-norm transformer with \
RMSNorm, rotary positions and SwiGLU is trained as a residual and as a reversible network: the same branches, \
parameters, initial weights, batches and learning rates (one cycle over all steps). The language model predicts the \
characters of Python's reference, the image classifier sees scikit-learn's digits in patches of 2×2.

'compute' counts the products of the whole training, relative to the reversible network: a step that recomputes does \
about 4/3 of the products of one that stores. 'residual, checkpointed' (torch's checkpoint on each block) computes \
the same as 'stored' and so has its loss. 'peak' is the peak of live activations in a step, without parameters and \
their gradients. Mean ± standard deviation over seeds."""

LIMITS = """\
## What this shows, and what not

It compares the same branches in two wirings, at sizes that two processor cores can train, far from convergence. \
Where the difference is within the spread, being reversible cost nothing that these runs can see. Equal compute is \
another matter: a residual network that has the memory to store its activations can take 4/3 of the steps instead, \
and training is so far from its end here that more steps help either network a lot. That is the price of \
recomputing, which checkpointing pays too. It does not follow that this holds for large models or long training, \
which were not tested. Nor does it say that reversing is the best use of memory: the checkpointed residual network \
needs the same compute, and at a few blocks its peak is nearly as low. What reversing adds is that the peak does not \
grow with depth, as the picture shows."""


if __name__ == "__main__":
    run(main)
