"""A character model of the text that comes with every Python, at any depth in the same memory; then it generates text.

The model is `retrograde.models.ReversibleLM`: rotary positions, grouped-query attention, and a loss that never holds
the logits of all characters. With --exact its streams are on a grid, and the gradients of memory="reverse" are
bit-identical to those of stored activations. At the end it continues a prompt, one character at a time, with a cache
of keys and values.
"""

from __future__ import annotations

import argparse
import time
from pydoc_data.topics import topics
from typing import Literal

import torch
from torch import Tensor, nn

from memory_by_depth import print_memory
from retrograde.models import ReversibleLM
from terminal import Progress, run

HEADS, KV_HEADS, LENGTH, BATCH = 4, 2, 96, 16
Memory = Literal["store", "checkpoint", "reverse"]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="run for a few seconds instead of a minute, to check that it works"
    )
    parser.add_argument("--steps", type=positive, help="training steps (default: 400, small: 8)")
    parser.add_argument("--depth", type=positive, help="blocks (default: 8, small: 2)")
    parser.add_argument("--width", type=positive, help="of the streams, a multiple of 8 (default: 64)", default=64)
    parser.add_argument("--memory", choices=("store", "checkpoint", "reverse"), default="reverse")
    parser.add_argument("--exact", action="store_true", help="put the streams on a grid, so that nothing drifts")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random numbers (default: 0)")
    options = parser.parse_args()
    if options.width % (2 * HEADS):
        parser.error(f"argument --width: {options.width} is not a multiple of {2 * HEADS} ({HEADS} heads of pairs)")
    options.steps = options.steps or (8 if options.small else 400)
    options.depth = options.depth or (2 if options.small else 8)
    return options


class Corpus:
    """The text as numbers. The last tenth of it is not trained on."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        numbers = torch.tensor([number[character] for character in text])
        self.seen, self.unseen = numbers.split([len(numbers) * 9 // 10, len(numbers) - len(numbers) * 9 // 10])

    def batch(self, part: Tensor, size: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(part) - LENGTH, (size, 1), generator=generator)
        return part[starts + torch.arange(LENGTH + 1)]

    def numbers(self, text: str) -> Tensor:
        return torch.tensor([[self.characters.index(character) for character in text]])

    def text(self, numbers: Tensor) -> str:
        return "".join(self.characters[i] for i in numbers)


def train(model: ReversibleLM, corpus: Corpus, steps: int, generator: torch.Generator) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps + 1)
    progress = Progress("characters", steps)
    for step in range(1, steps + 1):
        loss = model.loss(corpus.batch(corpus.seen, BATCH, generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress.show(step, loss.item())


def write(model: ReversibleLM, corpus: Corpus, samples: int, seed: int) -> None:
    """Print a few texts, no longer than those it was trained on."""
    prompts = corpus.numbers("The ").expand(samples, -1)
    start, steps = time.perf_counter(), LENGTH - prompts.shape[1]
    generator = torch.Generator().manual_seed(seed)
    texts = model.generate(prompts, steps, temperature=0.7, top_k=20, generator=generator)
    print(f"\nGenerated, {samples * steps / (time.perf_counter() - start):.0f} characters per second:")
    for sample in texts:
        print("  | " + corpus.text(sample).replace("\n", "\n  | "))


def main() -> None:
    options = read_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the matrices are too small for several threads
    corpus = Corpus()

    def build(depth: int, memory: Memory) -> ReversibleLM:
        vocabulary = len(corpus.characters)
        return ReversibleLM(vocabulary, options.width, depth, HEADS, KV_HEADS, memory=memory, exact=options.exact)

    model = build(options.depth, options.memory)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"Training {options.depth} blocks of width {options.width} ({weights:,} weights), memory={options.memory}:")
    generator = torch.Generator().manual_seed(options.seed + 1)
    train(model, corpus, options.steps, generator)
    unseen = corpus.batch(corpus.unseen, 4 if options.small else 64, generator)
    with torch.no_grad():
        print(f"\nUnseen text: {model.loss(unseen):.3f} nats per character ({len(corpus.characters)} different ones)")
    write(model, corpus, 1 if options.small else 4, options.seed)
    print_memory(build, lambda model: model.loss(unseen[:BATCH]), depths=(4, 16))


if __name__ == "__main__":
    run(main)
