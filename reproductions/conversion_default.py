"""Which reversible recipe of `convert` fine-tunes best, on pre-norm and post-norm networks that were trained here.

Two character models are fine-tuned as they are, and after each recipe. On the exact grid all memory modes give the same
bits, so that everything runs with stored activations. The question is which recipe should be the reversible default, at
one extra bit per element per layer or less. retrofit_minilm.py asks the same of pretrained weights.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conversion_recipes import Layer, Model
from conversion_recipes import train as train_characters
from conversion_recipes import unseen as unseen_characters
from report import Kept, Page, Progress, read_options, run, spread, table
from retrograde.conversion import Conversion, convert, recipes
from retrograde.conversion._recipes import Recipe
from training import task_of

START = 1 / 16
"""Where the scheduled coefficients start."""

ORIGINAL = "original"
RECIPES: dict[str, tuple[Recipe | None, float, str]] = {
    ORIGINAL: (None, 0.0, "0"),
    "momentum, β = 1/2": (recipes.Momentum(1 / 2), 1 / 2, "1"),
    "momentum, β from 1/16 to 1/2": (recipes.Momentum(START), 1 / 2, "1 at the end"),
    "momentum, β = 1/16": (recipes.Momentum(1 / 16), 1 / 16, "4"),
    "scaled (MEFT), λ = 1/16": (recipes.ScaledResidual(1 / 16), 1 / 16, "4"),
    "BDIA": (recipes.BDIA(), 0.0, "1"),
    "two streams": (recipes.TwoStream(), 0.0, "0"),
}
"""By name: the recipe, the value that its coefficient has at the end, and its extra bits."""

Losses = tuple[float, float]
"""On unseen data, after the conversion and after fine-tuning."""


@dataclass(frozen=True)
class Sizes:
    """`training` and `tuning` are steps."""

    width: int
    depth: int
    training: int
    tuning: int


FULL = Sizes(width=32, depth=8, training=150, tuning=50)
QUICK = Sizes(width=16, depth=3, training=2, tuning=2)


class Network(Protocol):
    """A trained network, and how it is fine-tuned."""

    steps: int

    def make(self, seed: int) -> nn.Module: ...
    def tune(self, model: nn.Module, seed: int, before: Callable[[int], None]) -> None: ...
    def unseen(self, model: nn.Module) -> float: ...


class PostNormLayer(Layer):
    """The same layer with its normalisations after the residual additions."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out


class Characters:
    """The character model of conversion_recipes.py, pre-norm or post-norm."""

    def __init__(self, sizes: Sizes, layer: type[Layer]) -> None:
        self.sizes, self.layer, self.steps = sizes, layer, sizes.tuning

    def make(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        task: Any = task_of("characters")
        model = Model(task.characters, task.length, self.sizes.width, self.sizes.depth)
        model.layers = nn.ModuleList(self.layer(self.sizes.width) for _ in range(self.sizes.depth))
        train_characters(model, self.sizes.training, 8, 100 + seed, 2e-3, lambda step: None)
        return model

    def tune(self, model: nn.Module, seed: int, before: Callable[[int], None]) -> None:
        train_characters(model, self.steps, 8, 500 + seed, 1e-3, before)

    def unseen(self, model: nn.Module) -> float:
        return unseen_characters(model)


def scheduled(conversion: Conversion | None, last: float, step: int, steps: int) -> None:
    """Move the coefficient of momentum towards its last value over the first half of the steps, in eight jumps."""
    recipe = None if conversion is None else conversion.stack.recipe
    if conversion is None or not isinstance(recipe, recipes.Momentum):
        return
    done = min(8, int(16 * step / steps)) / 8
    value = START + (last - START) * done
    if value > recipe.beta:
        conversion.anneal(value)


def tuned(network: Network, base: nn.Module, name: str, seed: int) -> Losses:
    recipe, last, _ = RECIPES[name]
    model = copy.deepcopy(base)
    conversion = None if recipe is None else convert(model, recipe, memory="store")
    before = network.unseen(model)
    network.tune(model, seed, lambda step: scheduled(conversion, last, step, network.steps))
    return before, network.unseen(model)


def tune_all(network: Network, place: str, seed: int, kept: Kept, progress: Progress) -> dict[str, Losses]:
    """Every recipe on the network of one seed, which is trained only if a result is missing."""
    bases: list[nn.Module] = []

    def one(name: str) -> Losses:
        bases[:] = bases or [network.make(seed)]
        return tuned(network, bases[0], name, seed)

    results = {}
    for name in RECIPES:
        results[name] = kept(f"loss: {place}, {name}, seed {seed}", functools.partial(one, name))
        progress.step(f"{place}, {name}, seed {seed}: {results[name][1]:.4f}")
    return results


def loss_rows(seeds: list[dict[str, Losses]]) -> list[list[str]]:
    """Per recipe: its name, extra bits, and the losses over seeds."""
    rows = []
    for name in RECIPES:
        before, after = ([losses[name][i] for losses in seeds] for i in (0, 1))
        difference = [losses[name][1] - losses[ORIGINAL][1] for losses in seeds]
        rows.append([name, RECIPES[name][2], spread(before), spread(after), spread(difference)])
    return rows


LOSS_HEAD = ["recipe", "extra bits per element per layer", "converted", "fine-tuned", "minus the original"]


def verdict(seeds: list[dict[str, Losses]]) -> str:
    """The recipes within the spread of the original network, in a sentence."""
    deviation = statistics.stdev([losses[ORIGINAL][1] for losses in seeds]) if len(seeds) > 1 else 0.0
    means = {
        name: statistics.mean(losses[name][1] - losses[ORIGINAL][1] for losses in seeds)
        for name in RECIPES
        if name != ORIGINAL
    }
    within = [name for name, mean in means.items() if mean <= deviation]
    fixed, moved = "momentum, β = 1/2", "momentum, β from 1/16 to 1/2"
    gain = [losses[moved][1] - losses[fixed][1] for losses in seeds]
    return (
        f"The original network's own standard deviation over seeds is {deviation:.4f}. No further than that above its "
        f"loss: {'; '.join(within) or 'none'}. Per seed, the schedule of β changes the loss by {spread(gain)}."
    )


def main() -> None:
    options = read_options(__doc__)
    sizes, seeds = (QUICK, range(1)) if options.quick else (FULL, range(3))
    kept = Kept("conversion_default", options, sizes)
    page = Page("conversion_default", "Which recipe of convert should be the reversible default", options, kept)
    networks = {
        "characters, pre-norm": Characters(sizes, Layer),
        "characters, post-norm": Characters(sizes, PostNormLayer),
    }
    progress = Progress("conversions", len(networks) * len(seeds) * len(RECIPES))
    page.add(
        f"Character models of {sizes.depth} layers, trained for {sizes.training} steps, converted and fine-tuned for "
        f"{sizes.tuning} steps; mean over {len(seeds)} seeds ± standard deviation of the loss on unseen data in eval. "
        "'minus the original' compares with the original network, fine-tuned for as many steps on the same batches: "
        "that is also what the recipe 'unchanged' gives, to the bit. Scheduled coefficients reach their last value "
        "after half of the steps. [retrofit_minilm](retrofit_minilm.md) has the same recipes on pretrained weights."
    )
    for place, network in networks.items():
        results = [tune_all(network, place, seed, kept, progress) for seed in seeds]
        page.add(f"## {place}", table(LOSS_HEAD, loss_rows(results)), verdict(results))
    page.write()


if __name__ == "__main__":
    run(main)
