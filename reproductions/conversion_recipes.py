"""How each recipe that makes a trained residual network reversible changes its loss.

A small pre-norm transformer is trained on characters as an ordinary residual network. Each recipe of
`retrograde.convert` is applied to a copy of it. The loss on unseen text is measured right after the conversion and
after fine-tuning, and compared with the original network, fine-tuned for as many steps. Then the memory: the bytes of
the extra bits, and the peak of a training step compared with checkpointing.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from report import Page, Progress, read_options, run, spread, table
from retrograde.conversion import Conversion, Report, convert, recipes
from retrograde.conversion._recipes import Recipe
from retrograde.measure import MemoryTracker
from retrograde.measure import format_bytes as size
from training import task_of

RECIPES: dict[str, Recipe | None] = {
    "original": None,
    "BDIA": recipes.BDIA(),
    "momentum, β = 1/16": recipes.Momentum(1 / 16),
    "scaled (MEFT), λ = 1/16": recipes.ScaledResidual(1 / 16),
    "scaled (MEFT), λ = 1/4": recipes.ScaledResidual(1 / 4),
    "two streams, mean": recipes.TwoStream(),
    "two streams, mean, updates doubled": recipes.TwoStream(scale=2.0),
    "leapfrog at once": recipes.Annealed(1.0),
    "annealed to leapfrog": recipes.Annealed(0.0),
}


@dataclass(frozen=True)
class Sizes:
    """`training` and `tuning` are steps."""

    width: int
    depth: int
    batch: int
    training: int
    tuning: int
    seeds: int


FULL = Sizes(width=64, depth=8, batch=8, training=400, tuning=120, seeds=3)
QUICK = Sizes(width=16, depth=3, batch=2, training=4, tuning=4, seeds=1)


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Attention(nn.Module):
    """Causal attention with heads of 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, -1, 16)).movedim(1, -2).unbind(-4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(-2, -3).flatten(-2))
        return out


class Model(nn.Module):
    """A language model of characters, with its layers in an nn.ModuleList."""

    def __init__(self, characters: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        self.saves: Literal["all", "inputs"] = "all"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x) if self.saves == "all" else checkpoint(layer, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(model: nn.Module, steps: int, batch: int, seed: int, rate: float, before: Callable[[int], None]) -> None:
    """AdamW with warm-up and linear decay of the learning rate. `before` is called before each step."""
    task, generator = task_of("characters"), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    torch.manual_seed(seed)
    model.train()
    for step in range(steps):
        before(step)
        tokens, targets = task.batch(batch, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def unseen(model: nn.Module) -> float:
    """The loss on unseen text."""
    model.eval()
    losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in task_of("characters").unseen()]
    return float(torch.stack(losses).mean())


@dataclass
class Result:
    """One recipe on one trained network. `seconds` is the time of a training step relative to the original network."""

    before: float
    after: float
    report: Report | None
    seconds: dict[str, float]


def tuned(base: Model, recipe: Recipe | None, sizes: Sizes, seed: int) -> Result:
    """Convert a copy, and fine-tune it."""
    model = copy.deepcopy(base)
    conversion = None if recipe is None else convert(model, recipe)
    before = unseen(model)
    train(model, sizes.tuning, sizes.batch, 500 + seed, 1e-3, lambda step: annealed(conversion, step, sizes.tuning))
    after, report = unseen(model), None
    tokens, targets = task_of("characters").batch(sizes.batch, torch.Generator().manual_seed(seed))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    if conversion is not None:
        report = conversion.measure(tokens, loss=loss)
    return Result(before, after, report, seconds(model, conversion, lambda: loss(model(tokens)).backward()))


def seconds(model: Model, conversion: Conversion | None, step: Callable[[], None]) -> dict[str, float]:
    """Processor time of a step in each way: the median of its ratios to the original network in the same round."""
    ways = ["torch checkpoint"] if conversion is None else ["checkpoint", "reverse"]
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    model.train()
    for _ in range(9):
        with nullcontext() if conversion is None else conversion.original():
            step()
            original = _timed(step)
        for way in ways:
            if conversion is None:
                model.saves = "inputs"
            else:
                conversion.stack.memory = way
            step()
            ratios[way].append(_timed(step) / original)
        model.saves = "all"
    return {way: statistics.median(values) for way, values in ratios.items()}


def _timed(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def checkpointed_peak(model: Model, sizes: Sizes) -> int:
    """The peak of a step of the original network with torch's checkpoint."""
    tokens, targets = task_of("characters").batch(sizes.batch, torch.Generator().manual_seed(0))
    model = copy.deepcopy(model).train()
    model.saves = "inputs"
    for _ in range(2):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        with MemoryTracker(ignore=[model, tokens, targets, *gradients]) as tracker:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    return int(tracker.peak)


def annealed(conversion: Conversion | None, step: int, steps: int) -> None:
    """Move γ from 0 to 1 in sixteenths over the first three quarters; no extra bits are needed from there on."""
    if conversion is None or not isinstance(recipe := conversion.stack.recipe, recipes.Annealed):
        return
    gamma = min(1.0, int(16 * step / (0.75 * steps)) / 16)
    if gamma > recipe.gamma:
        conversion.anneal(gamma)


def main() -> None:
    options = read_options(__doc__)
    sizes = QUICK if options.quick else FULL
    page = Page("conversion_recipes", "What each recipe of convert does to the loss", options)
    progress = Progress("conversions", sizes.seeds * (len(RECIPES) + 1))
    results: dict[str, list[Result]] = {name: [] for name in RECIPES}
    for seed in range(sizes.seeds):
        torch.manual_seed(seed)
        task = task_of("characters")
        base = Model(task.characters, task.length, sizes.width, sizes.depth)  # type: ignore[attr-defined]
        train(base, sizes.training, sizes.batch, 100 + seed, 3e-3, lambda step: None)
        progress.step(f"trained, seed {seed}: {unseen(base):.4f}")
        for name, recipe in RECIPES.items():
            results[name].append(tuned(base, recipe, sizes, seed))
            progress.step(f"{name}, seed {seed}: {results[name][-1].before:.4f}, then {results[name][-1].after:.4f}")
    write(page, sizes, results, checkpointed_peak(base, sizes))


def write(page: Page, sizes: Sizes, results: dict[str, list[Result]], checkpointed: int) -> None:
    parameters = f"width {sizes.width}, {sizes.depth} layers, batches of {sizes.batch} × 64 characters"
    page.add(
        f"A character model ({parameters}) was trained for {sizes.training} steps as a residual network, then "
        f"converted and fine-tuned for {sizes.tuning} steps; {sizes.seeds} seeds, mean ± standard deviation of the "
        "loss on unseen text, in eval. Fine-tuning ran with memory='reverse' on the exact grid.",
        "## Loss",
        table(["recipe", "converted", "fine-tuned", "fine-tuned, minus the original"], loss_rows(results)),
        "## Bytes and time of one training step, after fine-tuning",
        "Peaks are live bytes without parameters, gradients and batch; the original network stores everything. Time is "
        "processor time, as a ratio to the original network. The original network with torch's checkpoint peaks at "
        f"{size(checkpointed)} and takes {median(results['original'], 'torch checkpoint')} times as long. The gradient "
        "error is relative to stored activations.",
        table(
            [
                "recipe", "extra bits per element per layer", "extra bits in total", "peak: original", "checkpoint",
                "reverse", "time: checkpoint", "reverse ", "gradient error",
            ],
            byte_rows(results),
        ),
    )  # fmt: skip
    page.write()


def median(runs: list[Result], way: str) -> str:
    return f"{statistics.median(r.seconds[way] for r in runs):.2f}"


def loss_rows(results: dict[str, list[Result]]) -> list[list[str]]:
    rows = []
    for name, runs in results.items():
        differences = [a.after - b.after for a, b in zip(runs, results["original"], strict=True)]
        rows.append([name, spread([r.before for r in runs]), spread([r.after for r in runs]), spread(differences)])
    return rows


def byte_rows(results: dict[str, list[Result]]) -> list[list[str]]:
    rows = []
    for name, runs in results.items():
        report = runs[0].report
        if report is not None:
            peaks = [size(report.peaks[mode]) for mode in ("original", "checkpoint", "reverse")]
            error = max(r.report.gradient_error for r in runs if r.report is not None)
            rows.append(
                [
                    name,
                    f"{report.side_bits:.3g}",
                    size(report.side_bytes),
                    *peaks,
                    median(runs, "checkpoint"),
                    median(runs, "reverse"),
                    f"{error:g}",
                ]
            )
    return rows


if __name__ == "__main__":
    run(main)
