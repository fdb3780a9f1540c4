"""How well the planner predicts: peak and time of several plans, against real steps, interleaved.

    python benchmarks/plan_predictions.py [--quick] [--output DIR]

In each round a chain is measured, and right after it the plans that it predicts are run, so that both meet the machine
at the same speed. The limits are 5% for the peak and 10% for the ratio of times; the report names the plans that exceed
them, and the exit status is then 1. It goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products are illegal instructions on some CPUs

import torch
from torch import Tensor, nn

import retrograde as rg
from harness.machine import describe, load
from retrograde.engine.preserve import preserve
from retrograde.measure.stacks import the_stack
from retrograde.measure.timing import least_seconds
from retrograde.measure.training_step import step_seconds
from retrograde.models import ReversibleLM
from retrograde.planning import Prediction, measure, measured, predict
from retrograde.planning._measure import following

PEAK, TIME = 0.05, 0.10


@dataclass(frozen=True)
class Setting:
    """A model to predict: how to make it with its batch, and on how many threads it runs."""

    title: str
    make: Callable[[], tuple[nn.Module, Tensor]]
    threads: int = 1


def language_model(width: int, depth: int, length: int) -> Setting:
    def make() -> tuple[nn.Module, Tensor]:
        return ReversibleLM(vocabulary=256, width=width, depth=depth, heads=4), torch.randint(256, (2, length))

    return Setting(f"language model, width {width}, depth {depth}, length {length}, one thread", make)


def small_mlps(depth: int, threads: int) -> Setting:
    """Steps of a few milliseconds, with much overhead around their matrix products."""

    def mlp(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )  # fmt: skip

    def make() -> tuple[nn.Module, Tensor]:
        blocks = [rg.two_stream(mlp(32), mlp(32)) for _ in range(depth)]
        return rg.ReversibleSequence(blocks), torch.randn(16, 64, 32)

    return Setting(f"MLPs of width 32, depth {depth}, {threads} thread{'s' * (threads > 1)}", make, threads)


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [language_model(64, 6, 64), small_mlps(6, 1)]
    return [
        language_model(128, 12, 256),
        language_model(256, 8, 512),
        small_mlps(8, 1),
        small_mlps(32, 1),
        small_mlps(8, 2),
    ]


def plans(depth: int) -> dict[str, list[Any]]:
    third = depth // 3
    return {
        "store": ["store"] * depth,
        "checkpoint": ["checkpoint"] * depth,
        "reverse": ["reverse"] * depth,
        "selective": ["selective"] * depth,
        "reverse, the last third stored": ["reverse"] * (depth - third) + ["store"] * third,
        "the first third stored, then reverse": ["store"] * third + ["reverse"] * (depth - third),
        "by turns": [("checkpoint", "reverse", "store")[i % 3] for i in range(depth)],
    }


@dataclass(frozen=True)
class Round:
    """What was predicted for each plan, and what was measured right after it."""

    predicted: dict[str, Prediction]
    seconds: dict[str, float]

    def off(self, name: str) -> float:
        return self.ratio(name) / (self.seconds[name] / self.seconds["store"]) - 1

    def ratio(self, name: str) -> float:
        return self.predicted[name].seconds / self.predicted["store"].seconds

    def steady(self) -> bool:
        """Whether the machine kept its speed: storing everything took as long as it did for the prediction."""
        return abs(self.predicted["store"].seconds / self.seconds["store"] - 1) < TIME


def compare(setting: Setting, rounds: int) -> tuple[list[str], list[str]]:
    """The table, and the plans that exceed the limits."""
    torch.manual_seed(0)
    torch.set_num_threads(setting.threads)
    model, batch = setting.make()
    stack = the_stack(model)
    chosen = plans(len(stack))
    ways = {name: partial(following, stack, memory) for name, memory in chosen.items()}
    peaks = {}
    for name, way in ways.items():
        with way():
            peaks[name] = measured(model, batch).peak
    taken: list[Round] = []
    for i in range(rounds):
        print(f"\r{setting.title}: round {i + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        chain = measure(model, batch)
        with preserve(model):
            seconds = least_seconds(ways, partial(step_seconds, model, batch))
        taken.append(Round({name: predict(chain, memory) for name, memory in chosen.items()}, seconds))
    print(file=sys.stderr)
    steady = [each for each in taken if each.steady()]
    lines = [
        f"The machine changed its speed within {rounds - len(steady)} of {rounds} rounds, which are left out.",
        "",
        "| plan | peak, predicted / measured | off by | time ratio, predicted | measured | off by (each round) |",
        "|---|---|---|---|---|---|",
    ]
    past = [] if len(steady) >= 3 else [f"too few steady rounds: {len(steady)}"]
    for name in chosen if steady else ():
        peak = steady[0].predicted[name].peak
        larger = peak / peaks[name] - 1
        later = [each.off(name) for each in steady]
        late = statistics.median(later)
        ratio = statistics.median(each.ratio(name) for each in steady)
        real = statistics.median(each.seconds[name] / each.seconds["store"] for each in steady)
        lines.append(
            f"| {name} | {peak} / {peaks[name]} | {larger:+.1%} | {ratio:.3f} | {real:.3f} "
            f"| {late:+.1%} ({', '.join(f'{each:+.1%}' for each in later)}) |"
        )
        past += [f"the peak of {name} by {larger:+.1%}"] * (abs(larger) > PEAK)
        past += [f"the time of {name} by {late:+.1%}"] * (abs(late) > TIME)
    return lines, past


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    lines = ["# What the planner predicts, and what real steps take", "", *describe(load(), ["torch"])]
    past: list[str] = []
    for setting in settings(chosen.quick):
        table, wrong = compare(setting, 3 if chosen.quick else 5)
        lines += ["", f"## {setting.title}", "", *table]
        past += [f"{setting.title}: {each}" for each in wrong]
    verdict = [f"Past the limits: {'; '.join(past)}."] if past else ["All within the limits."]
    limits = f"Limits: {PEAK:.0%} for the peak, {TIME:.0%} for the ratio of times (the median of the rounds)."
    lines += ["", limits, "", *verdict]
    text = "\n".join(lines) + "\n"
    chosen.output.mkdir(parents=True, exist_ok=True)
    target = chosen.output / f"{datetime.date.today()}-plan{'-quick' if chosen.quick else ''}.md"
    target.write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {target}", file=sys.stderr)
    sys.exit(1 if past else 0)


if __name__ == "__main__":
    main()
