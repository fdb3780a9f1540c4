"""The work of `retrograde demo`: one deep character model trained in three memory modes, and its memory over depth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.diagnose import MemoryTracker
from retrograde.models import ReversibleLM

Memory = Literal["store", "checkpoint", "reverse"]
MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")
RATE = 3e-3
GRID = 14  # bits: streams up to 1024 are exact
Tell = Callable[[int, float, float, int], None]  # step, loss, tokens a second, peak bytes


@dataclass(frozen=True)
class Size:
    """How much of everything. All modes are compared over `compared` steps; one of them trains for all `steps`."""

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
    """A run in one memory mode: each loss, seconds a step, the peak of a step in bytes, and the weights.

    The peak leaves out the parameters and their gradients. The weights are those after `Size.compared` steps.
    """

    memory: Memory
    losses: list[float]
    seconds: float
    peak: int
    weights: list[Tensor] = field(repr=False)

    def equals(self, other: Training, steps: int) -> bool:
        """Whether the losses of the first steps, and the weights after them, are the same to the bit."""
        same = all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))
        return same and self.losses[:steps] == other.losses[:steps]

    def figures(self) -> dict[str, Any]:
        return {"memory": self.memory, "losses": self.losses, "seconds_a_step": self.seconds, "peak": self.peak}


class Corpus:
    """The reference that comes with every Python, as numbers."""

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


def build(corpus: Corpus, size: Size, memory: Memory, *, depth: int | None = None) -> ReversibleLM:
    depth = depth or size.depth
    model = ReversibleLM(len(corpus.characters), size.width, depth, size.heads, memory=memory, exact=GRID)
    nn.init.normal_(model.embed.weight, std=size.width**-0.5)  # not to be drowned by the updates of a deep stack
    return model


def train(
    corpus: Corpus, size: Size, memory: Memory, *, steps: int, seed: int, tell: Tell
) -> tuple[ReversibleLM, Training]:
    """Train for so many steps. The weights at the start and the batches depend on the seed alone."""
    torch.manual_seed(seed)
    model = build(corpus, size, memory)
    peak = peak_of(model, corpus.batch(size, torch.Generator().manual_seed(seed + 1)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _slope(step, size.steps))
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
        tell(step, losses[-1], step * size.batch * size.length / (time.perf_counter() - began), peak)
    return model, Training(memory, losses, (time.perf_counter() - began) / steps, peak, weights)


def _slope(step: int, steps: int) -> float:
    """Of the learning rate: up over the first steps, then down to nearly nothing."""
    warm = max(1, steps // 8)
    return min((step + 1) / warm, max(0.02, (steps - step) / (steps - warm)))


def peak_of(model: ReversibleLM, tokens: Tensor) -> int:
    """Bytes at the peak of a forward and a backward pass, less the parameters and their gradients."""
    model.loss(tokens).backward()  # so that the gradients are there to be ignored
    with MemoryTracker(ignore=[model, tokens]) as tracker:
        model.loss(tokens).backward()
    model.zero_grad()
    peak: int = tracker.peak
    return peak


def sweep(corpus: Corpus, size: Size, seed: int, tell: Callable[[int], None]) -> dict[Memory, list[int]]:
    """The peak of a step at each depth, in each mode."""
    tokens = corpus.batch(size, torch.Generator().manual_seed(seed + 1))
    peaks: dict[Memory, list[int]] = {memory: [] for memory in MODES}
    for depth in size.depths:
        tell(depth)
        for memory in MODES:
            torch.manual_seed(seed)
            peaks[memory].append(peak_of(build(corpus, size, memory, depth=depth), tokens))
    return peaks


def sample(model: ReversibleLM, corpus: Corpus, size: Size, seed: int) -> list[str]:
    """What the model makes of a beginning, a few times, no longer than the texts it was trained on."""
    generator = torch.Generator().manual_seed(seed + 2)
    beginnings = corpus.encode("The ").expand(size.samples, -1)
    steps = size.length - beginnings.shape[1]
    found = model.generate(beginnings, steps, temperature=0.7, top_k=20, generator=generator)
    return [corpus.decode(row) for row in found]
