"""What exact couplings and the guard cost: time of a step, and bytes of activations.

Contenders run interleaved in one process, each once per round in shuffled order, on the same weights and input;
ratios are computed per round.
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
from report import Page, Progress, quartiles, read_options, run, table
from retrograde.measure import MemoryTracker, format_bytes
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
        Contender("reversed, repeated", stack(), "reversed"),
        Contender("reversed, exact", stack(exact=True), "reversed"),
        Contender("reversed, guard not due", stack(guard=rg.Guard(every=NEVER)), "reversed"),
        Contender("reversed, guard due in every call", stack(guard=rg.Guard(every=1)), "reversed"),
        Contender("reversed, exact, guard due in every call", stack(exact=True, guard=exact_guard()), "reversed"),
    ]


def exact_guard() -> rg.Guard:
    return rg.Guard(every=1, tolerance=0.0, action="raise")


def step(stack: rg.ReversibleSequence, x: Tensor) -> float:
    """The seconds of a forward and a backward pass, without gradients at the start and without an optimiser."""
    stack.zero_grad()
    start = time.perf_counter()
    output = stack(x)
    assert isinstance(output, Tensor)
    output.square().mean().backward()
    return time.perf_counter() - start


def timed(all_of_them: list[Contender], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """The seconds of each round."""
    order, shuffle = list(all_of_them), random.Random(0).shuffle
    seconds_of: dict[str, list[float]] = {contender.name: [] for contender in order}
    progress = Progress("Rounds", rounds + WARM_UP)
    gc.disable()  # a collection would count as time of the contender that runs
    try:
        for round_ in range(rounds + WARM_UP):
            shuffle(order)
            for contender in order:
                took = step(contender.stack, x)
                if round_ >= WARM_UP:
                    seconds_of[contender.name].append(took)
            gc.collect()
            progress.step(f"{len(order)} contenders")
    finally:
        gc.enable()
    return seconds_of


def activations(stack: rg.ReversibleSequence, x: Tensor) -> tuple[int, int]:
    """Bytes of live tensors after the forward pass and at the peak of a step, without parameters and gradients."""
    step(stack, x)  # so that there are gradients to ignore
    with MemoryTracker(ignore=[stack, x]) as tracker:
        output = stack(x)
        assert isinstance(output, Tensor)
        loss = output.square().mean()
        del output
        after_forward = tracker.live
        loss.backward()
    return after_forward, tracker.peak


def ratios(seconds_of: dict[str, list[float]], contender: Contender) -> list[float]:
    return [a / b for a, b in zip(seconds_of[contender.name], seconds_of[contender.to], strict=True)]


def results(all_of_them: list[Contender], seconds_of: dict[str, list[float]], x: Tensor) -> str:
    rows = []
    for contender in all_of_them:
        low, middle, high = quartiles(ratios(seconds_of, contender))
        _, milliseconds, _ = quartiles([1e3 * seconds for seconds in seconds_of[contender.name]])
        after_forward, peak = activations(contender.stack, x)
        ratio = "1" if contender.name == contender.to else f"{middle:.4f}"
        spread = "–" if contender.name == contender.to else f"{low:.4f} – {high:.4f}"
        rows.append(
            [contender.name, contender.to, ratio, spread, f"{milliseconds:.1f}", f"{after_forward:,}", f"{peak:,}"]
        )
    head = ["contender", "divided by", "time", "quartiles", "ms", "bytes after forward", "bytes at the peak"]
    return table(head, rows)


def amortised(seconds_of: dict[str, list[float]]) -> str:
    """The additional cost of a call in which the guard is due, spread over the calls from one to the next."""
    pairs = zip(seconds_of["reversed, guard due in every call"], seconds_of["reversed, guard not due"], strict=True)
    low, middle, high = quartiles([due / idle - 1 for due, idle in pairs])
    rows = [[every, *(f"{cost / every:+.3%}" for cost in (middle, low, high))] for every in (1, 10, 100)]
    return table(["the guard is due every … calls", "cost", "lower quartile", "upper quartile"], rows)


def main() -> None:
    options = read_options(__doc__)
    chosen = QUICK if options.quick else FULL
    page = Page("cost_of_exactness", "What exactness and the guard cost", options)
    all_of_them = contenders(chosen)
    x = torch.randn(chosen.batch, chosen.length, chosen.width)
    seconds_of = timed(all_of_them, x, chosen.rounds)
    pair = 2 * x.nbytes
    page.add(
        f"{chosen.depth} transformer blocks of width {chosen.width}, length {chosen.length}, batch {chosen.batch}, "
        f"{chosen.heads} heads, float32; a pair of streams takes {format_bytes(pair)} ({pair:,} bytes). Forward and "
        f"backward, {chosen.rounds} rounds after {WARM_UP} to warm up; the median of the ratios and their quartiles. "
        "*Reversed, repeated* is the same measured twice: its quartiles show how small a difference can be measured.",
        results(all_of_them, seconds_of, x),
        "Exact streams start as rounded copies of the input. With stored activations they are saved, so *stored, "
        "exact* holds one stream more than *stored*, which saves the input itself; no other row depends on the grid. A "
        "guard holds its samples (at most 4,096 entries per stream) in the calls in which it is due.",
        "A guard that is due in every 100th call cannot be timed in a few calls. Its cost is a hundredth of the "
        "additional time of a call in which it is due:",
        amortised(seconds_of),
    )
    page.write()


if __name__ == "__main__":
    run(main)
