"""Train one deep character model three ways, then measure what each way holds in memory.

The text is the reference that comes with every Python (`pydoc_data.topics`), so nothing is
downloaded. Run it with `make demo`, or `python examples/demo.py` where retrograde and
matplotlib are installed. It writes `demo-output/demo.png`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from retrograde.diagnose import MemoryTracker

Memory = Literal["store", "checkpoint", "reverse"]
MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")
STYLE = {"store": ("tab:red", "-", "o"), "checkpoint": ("tab:orange", "--", "s"), "reverse": ("tab:blue", ":", "^")}

DEPTH, WIDTH, HEADS = 48, 64, 4
BATCH, LENGTH, STEPS = 8, 64, 100
DEPTHS = (4, 8, 16, 32, 64)
OUTPUT = Path("demo-output")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        queries, keys, values = self.project(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class CharacterModel(nn.Module):
    def __init__(self, characters: int, depth: int, memory: Memory) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        blocks = [rg.two_stream(Attention(), feed_forward()) for _ in range(depth)]
        self.stack = rg.ReversibleSequence(blocks, memory=memory)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def loss(self, text: Tensor) -> Tensor:
        """The mean cross-entropy of each character, given those before it."""
        logits = self.head(self.norm(self.stack(self.embed(text[:, :-1]) + self.place)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def read_text() -> tuple[Tensor, int]:
    """The text as numbers, and how many different characters it has."""
    text = "\n".join(topics[name] for name in sorted(topics))
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text]), len(number)


def batch_of(text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


class Progress:
    """One line that is written over on a terminal, and a plain line now and then elsewhere."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.start = time.perf_counter()
        self.live = sys.stdout.isatty()

    def show(self, step: int, loss: float) -> None:
        seconds = time.perf_counter() - self.start
        rate, left = step * BATCH * LENGTH / seconds, seconds / step * (STEPS - step)
        line = (
            f"  {self.label:<11} step {step:>3}/{STEPS}  loss {loss:.4f}  {rate:>6,.0f} tokens/s  {left:>3.0f} s left"
        )
        if self.live:
            print(f"\r{line}", end="\n" if step == STEPS else "", flush=True)
        elif step % (STEPS // 4) == 0:
            print(line, flush=True)


def train(text: Tensor, characters: int, memory: Memory) -> list[float]:
    """The loss at every step; the seed and the batches are the same for every memory mode."""
    torch.manual_seed(0)
    model = CharacterModel(characters, DEPTH, memory)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    progress, losses = Progress(memory), []
    for step in range(1, STEPS + 1):
        loss = model.loss(batch_of(text, generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        progress.show(step, losses[-1])
    return losses


def say_how_equal(curves: dict[Memory, list[float]]) -> None:
    shown = [1, *range(STEPS // 5, STEPS + 1, STEPS // 5)]
    print(f"\n  {'step':<11}" + "".join(f"{step:>9}" for step in shown))
    for memory, losses in curves.items():
        print(f"  {memory:<11}" + "".join(f"{losses[step - 1]:>9.4f}" for step in shown))
    for memory in MODES[1:]:
        differences = [abs(a - b) for a, b in zip(curves["store"], curves[memory], strict=True)]
        first = next((step for step, difference in enumerate(differences, 1) if difference), None)
        if first is None:
            print(f"  {memory}: every loss is equal to the stored one, to the last bit.")
        else:
            print(f"  {memory}: the losses differ by {max(differences):.0e} at most, first at step {first}; ", end="")
            print("subtracting in float32 does not undo adding to the last bit.")


def peak_of(depth: int, characters: int, text: Tensor, memory: Memory) -> float:
    """MiB held at the peak of one forward and backward, less the parameters and their gradients."""
    model = CharacterModel(characters, depth, memory)
    model.loss(text).backward()  # so that the gradients are there to be ignored
    with MemoryTracker(ignore=[model, text]) as tracker:
        model.loss(text).backward()
    peak: int = tracker.peak
    return peak / 2**20


def sweep(text: Tensor, characters: int) -> dict[Memory, list[float]]:
    batch = batch_of(text, torch.Generator().manual_seed(1))
    print("  blocks     " + "".join(f"{memory:>12}" for memory in MODES))
    peaks: dict[Memory, list[float]] = {memory: [] for memory in MODES}
    for depth in DEPTHS:
        for memory in MODES:
            peaks[memory].append(peak_of(depth, characters, batch, memory))
        print(f"  {depth:<11}" + "".join(f"{peaks[memory][-1]:>8.1f} MiB" for memory in MODES), flush=True)
    return peaks


def draw(curves: dict[Memory, list[float]], peaks: dict[Memory, list[float]]) -> Path:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = range(1, STEPS + 1)
    for memory in MODES:
        colour, line, marker = STYLE[memory]
        left.plot(DEPTHS, peaks[memory], color=colour, linestyle="-", marker=marker, label=memory)
        right.plot(steps, curves[memory], color=colour, linestyle=line, linewidth=2, label=memory)
    left.set(
        title="Activation memory at the peak of a step", xlabel="blocks", ylabel="MiB", xticks=DEPTHS, ylim=(0, None)
    )
    right.set(title=f"Training loss, {DEPTH} blocks, one seed", xlabel="step", ylabel="loss (nats a character)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(title="memory=")
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / "demo.png"
    figure.savefig(path, dpi=150)
    return path


def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # the matrices are small: on a busy machine, threads would wait for each other
    text, characters = read_text()
    print(f"{len(text):,} characters of Python's own reference, {characters} different ones.")
    print(f"torch {torch.__version__}, one thread, float32.\n")
    print(f"1. Training {DEPTH} blocks of width {WIDTH}, batch {BATCH} of {LENGTH} characters, in each memory mode:")
    curves = {memory: train(text, characters, memory) for memory in MODES}
    say_how_equal(curves)
    print("\n2. Activation memory at the peak of a step, over depth (parameters and their gradients not counted):")
    peaks = sweep(text, characters)
    print(f"\nPicture: {draw(curves, peaks)}    ({time.perf_counter() - start:.0f} s in all)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped.")
        sys.exit(130)  # as a shell reports an interrupt
