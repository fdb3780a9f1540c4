"""The work of `retrograde demo`: a deep character model trained in three memory modes, and its memory over depth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.measure import MemoryTracker
from retrograde.models import ReversibleLM

Mode = Literal["store", "checkpoint", "reverse"]
MODES: tuple[Mode, ...] = ("store", "checkpoint", "reverse")
RATE = 3e-3
GRID_BITS = 14  # streams up to 1024 are exact
OnStep = Callable[[int, float, float, int], None]  # step, loss, tokens per second, peak bytes


@dataclass(frozen=True)
class Size:
    """The sizes of everything. All modes are compared over `compared` steps; one of them trains for all `steps`."""

    depth: int = 48
    width: int = 64
    heads: int = 4
    batch: int = 8
    length: int = 64
    steps: int = 280
    compared: int = 60
    depths: tuple[int, ...] = (4, 8, 16, 32, 64)
    samples: int = 6


FULL = Size()
QUICK = Size(width=16, heads=2, batch=2, length=16, steps=6, compared=4, depths=(4, 8, 16), samples=2)


@dataclass(frozen=True)
class Training:
    """A run in one memory mode: each loss, seconds per step, the peak of a step in bytes, and the weights.

    The peak does not count the parameters and their gradients. The weights are those after `Size.compared` steps.
    """

    memory: Mode
    losses: list[float]
    seconds: float
    peak: int
    weights: list[Tensor] = field(repr=False)

    def equals(self, other: Training, steps: int) -> bool:
        """Whether the losses of the first steps, and the weights after them, are the same to the bit."""
        same = all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))
        return same and self.losses[:steps] == other.losses[:steps]

    def figures(self) -> dict[str, Any]:
        return {"memory": self.memory, "losses": self.losses, "seconds_per_step": self.seconds, "peak": self.peak}


class Corpus:
    """The reference documentation that comes with every Python, as numbers."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        self._number = {character: i for i, character in enumerate(self.characters)}
        self.numbers = self.encode(text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self._number[character] for character in text])

    def decode(self, numbers: Tensor) -> str:
        return "".join(self.characters[i] for i in numbers)

    def batch(self, size: Size, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(self.numbers) - size.length, (size.batch, 1), generator=generator)
        return self.numbers[starts + torch.arange(size.length + 1)]


def build(corpus: Corpus, size: Size, memory: Mode, *, depth: int | None = None) -> ReversibleLM:
    depth = depth or size.depth
    vocabulary = len(corpus.characters)
    model = ReversibleLM(vocabulary, size.width, depth, size.heads, memory=memory, exact=True, grid_bits=GRID_BITS)
    nn.init.normal_(model.embed.weight, std=size.width**-0.5)  # large compared with the updates of a deep stack
    return model


def train(
    corpus: Corpus, size: Size, memory: Mode, *, steps: int, seed: int, on_step: OnStep
) -> tuple[ReversibleLM, Training]:
    """Train for so many steps. The initial weights and the batches depend only on the seed."""
    torch.manual_seed(seed)
    model = build(corpus, size, memory)
    peak = peak_of(model, corpus.batch(size, torch.Generator().manual_seed(seed + 1)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate_factor(step, size.steps))
    generator = torch.Generator().manual_seed(seed + 1)
    losses: list[float] = []
    weights: list[Tensor] = []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        loss = model.loss(corpus.batch(size, generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step == size.compared:
            weights = [parameter.detach().clone() for parameter in model.parameters()]
        on_step(step, losses[-1], step * size.batch * size.length / (time.perf_counter() - began), peak)
    return model, Training(memory, losses, (time.perf_counter() - began) / steps, peak, weights)


def _rate_factor(step: int, steps: int) -> float:
    """The factor of the learning rate: a linear warm-up, then a linear decay to nearly zero."""
    warmup = max(1, steps // 8)
    return min((step + 1) / warmup, max(0.02, (steps - step) / (steps - warmup)))


def peak_of(model: ReversibleLM, tokens: Tensor) -> int:
    """Bytes at the peak of a forward and a backward pass, less the parameters and their gradients."""
    model.loss(tokens).backward()  # so that there are gradients to ignore
    with MemoryTracker(ignore=[model, tokens]) as tracker:
        model.loss(tokens).backward()
    model.zero_grad()
    return tracker.peak


def sweep(corpus: Corpus, size: Size, seed: int, on_depth: Callable[[int], None]) -> dict[Mode, list[int]]:
    """The peak of a step at each depth, in each mode."""
    tokens = corpus.batch(size, torch.Generator().manual_seed(seed + 1))
    peaks: dict[Mode, list[int]] = {memory: [] for memory in MODES}
    for depth in size.depths:
        on_depth(depth)
        for memory in MODES:
            torch.manual_seed(seed)
            peaks[memory].append(peak_of(build(corpus, size, memory, depth=depth), tokens))
    return peaks


def sample(model: ReversibleLM, corpus: Corpus, size: Size, seed: int) -> list[str]:
    """A few continuations of a prompt, no longer than the texts that the model was trained on."""
    generator = torch.Generator().manual_seed(seed + 2)
    prompts = corpus.encode("The ").expand(size.samples, -1)
    steps = size.length - prompts.shape[1]
    texts = model.generate(prompts, steps, temperature=0.7, top_k=20, generator=generator)
    return [corpus.decode(text) for text in texts]
