"""What exact couplings and the guard cost: time of a step, and bytes of activations.

Contenders run interleaved in one process, each once a round in shuffled order, on the same weights and input;
ratios are taken round by round.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import retrograde as rg
from report import Page, Progress, quartiles, read_options, run, size, table
from retrograde.diagnose import MemoryTracker
from small_models import reversible, transformer

WARM_UP = 1
NEVER = 10**9


@dataclass(frozen=True)
class Size:
    width: int
    length: int
    batch: int
    depth: int
    heads: int
    rounds: int


QUICK = Size(width=16, length=8, batch=2, depth=4, heads=2, rounds=3)
FULL = Size(width=512, length=512, batch=1, depth=4, heads=8, rounds=25)


@dataclass(frozen=True)
class Contender:
    """A stack under a name, and the one that its time is divided by."""

    name: str
    stack: rg.ReversibleSequence
    to: str


def contenders(chosen: Size) -> list[Contender]:
    """All hold the same branches."""
    torch.manual_seed(0)
    pairs = transformer(chosen.width, chosen.depth, heads=chosen.heads)

    def stack(**options: Any) -> rg.ReversibleSequence:
        made = reversible(**options)(pairs)
        assert isinstance(made, rg.ReversibleSequence)
        return made

    return [
        Contender("stored", stack(memory="store"), "stored"),
        Contender("stored, exact", stack(memory="store", exact=True), "stored"),
        Contender("reversed", stack(), "reversed"),
        Contender("reversed, again", stack(), "reversed"),
        Contender("reversed, exact", stack(exact=True), "reversed"),
        Contender("reversed, guard not due", stack(guard=rg.Guard(every=NEVER)), "reversed"),
        Contender("reversed, guard due in every call", stack(guard=rg.Guard(every=1)), "reversed"),
        Contender("reversed, exact, guard due in every call", stack(exact=True, guard=exact_guard()), "reversed"),
    ]


def exact_guard() -> rg.Guard:
    return rg.Guard(every=1, tolerance=0.0, action="raise")


def step(stack: rg.ReversibleSequence, x: Tensor) -> float:
    """The seconds of a forward and a backward pass, from no gradients; without an optimiser, which would hide costs."""
    stack.zero_grad()
    start = time.perf_counter()
    output = stack(x)
    assert isinstance(output, Tensor)
    output.square().mean().backward()
    return time.perf_counter() - start


def timed(all_of_them: list[Contender], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """The seconds of each round."""
    order, shuffle = list(all_of_them), random.Random(0).shuffle
    found: dict[str, list[float]] = {contender.name: [] for contender in order}
    progress = Progress("Rounds", rounds + WARM_UP)
    gc.disable()  # a collection would be charged to whom it happens to fall to
    try:
        for round_ in range(rounds + WARM_UP):
            shuffle(order)
            for contender in order:
                took = step(contender.stack, x)
                if round_ >= WARM_UP:
                    found[contender.name].append(took)
            gc.collect()
            progress.step(f"{len(order)} contenders")
    finally:
        gc.enable()
    return found


def activations(stack: rg.ReversibleSequence, x: Tensor) -> tuple[int, int]:
    """Bytes of live tensors after the forward pass and at the peak of a step, less parameters and their gradients."""
    step(stack, x)  # so that the gradients are there to be ignored
    with MemoryTracker(ignore=[stack, x]) as tracker:
        output = stack(x)
        assert isinstance(output, Tensor)
        loss = output.square().mean()
        del output
        held: int = tracker.live
        loss.backward()
    peak: int = tracker.peak
    return held, peak


def ratios(found: dict[str, list[float]], contender: Contender) -> list[float]:
    return [a / b for a, b in zip(found[contender.name], found[contender.to], strict=True)]


def results(all_of_them: list[Contender], found: dict[str, list[float]], x: Tensor) -> str:
    rows = []
    for contender in all_of_them:
        low, middle, high = quartiles(ratios(found, contender))
        _, milliseconds, _ = quartiles([1e3 * seconds for seconds in found[contender.name]])
        held, peak = activations(contender.stack, x)
        ratio = "1" if contender.name == contender.to else f"{middle:.4f}"
        spread = "–" if contender.name == contender.to else f"{low:.4f} – {high:.4f}"
        rows.append([contender.name, contender.to, ratio, spread, f"{milliseconds:.1f}", f"{held:,}", f"{peak:,}"])
    head = ["contender", "divided by", "time", "quartiles", "ms", "bytes held after forward", "bytes at the peak"]
    return table(head, rows)


def amortised(found: dict[str, list[float]]) -> str:
    """What a call in which the guard is due costs above one in which it is not, spread over the calls between."""
    pairs = zip(found["reversed, guard due in every call"], found["reversed, guard not due"], strict=True)
    low, middle, high = quartiles([due / idle - 1 for due, idle in pairs])
    rows = [[every, *(f"{cost / every:+.3%}" for cost in (middle, low, high))] for every in (1, 10, 100)]
    return table(["the guard is due every … calls", "cost", "lower quartile", "upper quartile"], rows)


def main() -> None:
    options = read_options(__doc__)
    chosen = QUICK if options.quick else FULL
    page = Page("cost_of_exactness", "What exactness and the guard cost", options)
    all_of_them = contenders(chosen)
    x = torch.randn(chosen.batch, chosen.length, chosen.width)
    found = timed(all_of_them, x, chosen.rounds)
    pair = 2 * x.nbytes
    page.add(
        f"{chosen.depth} transformer blocks of width {chosen.width}, length {chosen.length}, batch {chosen.batch}, "
        f"{chosen.heads} heads, float32; a pair of streams takes {size(pair)} ({pair:,} bytes). Forward and backward, "
        f"{chosen.rounds} rounds after {WARM_UP} to warm up; the median of the ratios and their quartiles. "
        "*Reversed, again* is the same thing twice: its quartiles show what differences this machine can see.",
        results(all_of_them, found, x),
        "Exact streams start as rounded copies of the input. With stored activations they are kept, so that *stored, "
        "exact* holds a stream more than *stored*, which keeps the input itself; no other row depends on the grid. A "
        "guard holds its samples (4,096 entries a stream at most) in the calls in which it is due.",
        "A guard that is due every 100th call cannot be timed in a few calls. Its cost is a hundredth of what a call "
        "in which it is due takes longer than one in which it is not:",
        amortised(found),
    )
    page.write()


if __name__ == "__main__":
    run(main)
