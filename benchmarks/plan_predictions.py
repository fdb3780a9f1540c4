"""How well the planner predicts: peak and time of several plans, against real steps, interleaved.

    python benchmarks/plan_predictions.py [--quick] [--output DIR]

The limits are 5% for the peak and 10% for the ratio of times; the report says which plans are past them, and the
exit status is then 1. It goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products are illegal instructions on some CPUs

import torch

import retrograde as rg
from harness.machine import describe, load
from retrograde.models import ReversibleLM
from retrograde.planning import measure, measured, predict

Model = tuple[str, Any, Any, rg.ReversibleSequence]
PEAK, TIME = 0.05, 0.10


def models(quick: bool) -> list[Model]:
    torch.manual_seed(0)
    sizes = [(64, 6, 64)] if quick else [(128, 12, 256), (256, 8, 512)]
    found: list[Model] = []
    for width, depth, length in sizes:
        model = ReversibleLM(vocabulary=256, width=width, depth=depth, heads=4)
        tokens = torch.randint(256, (2, length))
        found.append((f"language model, width {width}, depth {depth}, length {length}", model, tokens, model.stack))
    return found


def plans(depth: int) -> dict[str, list[Any]]:
    third = depth // 3
    return {
        "store": ["store"] * depth,
        "checkpoint": ["checkpoint"] * depth,
        "reverse": ["reverse"] * depth,
        "partial": ["partial"] * depth,
        "reverse, the last third stored": ["reverse"] * (depth - third) + ["store"] * third,
        "the first third stored, then reverse": ["store"] * third + ["reverse"] * (depth - third),
        "by turns": [("checkpoint", "reverse", "store")[i % 3] for i in range(depth)],
    }


def compare(model: Any, tokens: Any, stack: rg.ReversibleSequence, rounds: int) -> tuple[list[str], list[str]]:
    """The table, and the plans that are past the limits."""
    chain = measure(model, tokens)
    chosen = plans(len(chain.blocks))
    real: dict[str, list[Any]] = {name: [] for name in chosen}
    for round_ in range(rounds):
        for name, memory in chosen.items():
            stack.memory = memory
            real[name].append(measured(model, tokens))
        print(f"\rround {round_ + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    stored = predict(chain, chosen["store"]).seconds
    lines = [
        "| plan | peak, predicted / measured | off by | time ratio of the least times, predicted "
        "| measured (quartiles of all rounds) | off by |",
        "|---|---|---|---|---|---|",
    ]
    past = []
    for name, memory in chosen.items():
        expected = predict(chain, memory)
        ratios = [a.seconds / b.seconds for a, b in zip(real[name], real["store"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = min(r.seconds for r in real[name]) / min(r.seconds for r in real["store"])  # least times, as predicted
        peak = min(found.peak for found in real[name])
        off, late = expected.peak / peak - 1, expected.seconds / stored / ratio - 1
        lines.append(
            f"| {name} | {expected.peak} / {peak} | {off:+.1%} | {expected.seconds / stored:.3f} "
            f"| {ratio:.3f} ({low:.3f} – {high:.3f}) | {late:+.1%} |"
        )
        past += [f"the peak of {name} by {off:+.1%}"] * (abs(off) > PEAK)
        past += [f"the time of {name} by {late:+.1%}"] * (abs(late) > TIME)
    return lines, past


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# What the planner predicts, and what real steps take", "", *describe(load(), ["torch"])]
    past: list[str] = []
    for title, model, tokens, stack in models(chosen.quick):
        table, wrong = compare(model, tokens, stack, 3 if chosen.quick else 15)
        lines += ["", f"## {title}", "", *table]
        past += [f"{title}: {each}" for each in wrong]
    verdict = [f"Past the limits: {'; '.join(past)}."] if past else ["All within the limits."]
    lines += ["", f"Limits: {PEAK:.0%} for the peak, {TIME:.0%} for the ratio of times.", "", *verdict]
    text = "\n".join(lines) + "\n"
    chosen.output.mkdir(parents=True, exist_ok=True)
    target = chosen.output / f"{datetime.date.today()}-plan{'-quick' if chosen.quick else ''}.md"
    target.write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {target}", file=sys.stderr)
    sys.exit(1 if past else 0)


if __name__ == "__main__":
    main()
