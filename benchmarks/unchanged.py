"""The recipe "unchanged" beside `gradient_checkpointing_enable`: at equal memory the time, at equal time the memory.

    python benchmarks/unchanged.py [--quick] [--bytes-only] [--output DIR]

GPT-2-, Llama- and BERT-shaped models of Hugging Face Transformers with random weights, on one thread. Peaks are exact
counts of live bytes in a training step, without parameters, gradients and batch. Times are processor time, interleaved:
in each round every way runs once, and its ratio to the original model is taken within the round. For each setting of
`every_n_layers` of transformers, the planner is given that peak as its budget, and its plan is run. The report goes to
benchmarks/results/unchanged.md; the exit status is 1 if a plan is slower or larger than what it was compared with.
"""

from __future__ import annotations

import argparse
import bisect
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products are illegal instructions on some CPUs

import torch
import transformers
from torch import Tensor, nn

import retrograde as rg
from harness.machine import describe, load
from retrograde.measure import format_bytes
from retrograde.measure.loss import default_loss
from retrograde.measure.training_step import step_tracker

EVERY = (1, 2, 4)
"""The settings of `every_n_layers` that are compared with."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models and of the measurement."""

    width: int
    depth: int
    length: int
    samples: int
    rounds: int


FULL = Sizes(width=256, depth=12, length=256, samples=2, rounds=15)
QUICK = Sizes(width=32, depth=4, length=16, samples=1, rounds=2)


def models(sizes: Sizes) -> dict[str, Callable[[], nn.Module]]:
    common = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    wide = {
        "hidden_size": sizes.width, "intermediate_size": 4 * sizes.width, "num_hidden_layers": sizes.depth,
        "num_attention_heads": 4, "max_position_embeddings": sizes.length,
    }  # fmt: skip
    gpt = {"n_embd": sizes.width, "n_layer": sizes.depth, "n_head": 4, "n_positions": sizes.length}
    return {
        "GPT-2-shaped": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **gpt)),
        "Llama-shaped": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, **wide, num_key_value_heads=4)
        ),
        "BERT-shaped": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**common, **wide)),
    }


@dataclass
class Way:
    """One way to train a model: its name, how the model is put into it, its peak, and its ratios of time."""

    name: str
    enter: Callable[[], None]
    peak: int
    ratios: list[float]

    def row(self) -> str:
        took = f"{statistics.median(self.ratios):.3f}" if self.ratios else "not measured"
        return f"| {self.name} | {format_bytes(self.peak)} | {took} |"


class Subject:
    """A model that is trained in one way after another. Stock ways run under `conversion.original()`."""

    def __init__(self, make: Callable[[], nn.Module], sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.model = make().train()
        tokens = torch.randint(1, 512, (sizes.samples, sizes.length))
        self.batch: dict[str, Tensor] = {"input_ids": tokens, "labels": tokens}
        self.conversion: Any = None

    def stock(self, every: int | None) -> None:
        """The model as it was, with its own checkpointing on every n-th layer, or without."""
        self.undo()
        self.model.gradient_checkpointing_disable()
        if every is not None:
            self.model.gradient_checkpointing_enable(every_n_layers=every)

    def unchanged(self, memory: Any) -> None:
        self.stock(None)
        self.conversion = rg.convert(self.model, "unchanged", memory=memory)

    def undo(self) -> None:
        if self.conversion is not None:
            self.conversion.undo()
            self.conversion = None

    def step(self) -> None:
        default_loss(self.model(**self.batch)).backward()

    def peak(self) -> int:
        for _ in range(2):  # gradients exist already, and what a first run keeps for later ones does not count
            self.step()
        with step_tracker(self.model, self.batch) as tracker:
            self.step()
        return int(tracker.peak)

    def seconds(self) -> float:
        self.step()
        start = time.process_time()
        self.step()
        return time.process_time() - start


def ways_of(subject: Subject) -> tuple[list[Way], list[tuple[Way, Way]]]:
    """All ways, and those that are to be compared: a setting of transformers with a plan for its peak."""

    def way(name: str, enter: Callable[[], None]) -> Way:
        enter()
        return Way(name, enter, subject.peak(), [])

    ways = [way("original, everything stored", lambda: subject.stock(None))]
    ways.append(way('"unchanged", memory="checkpoint"', lambda: subject.unchanged("checkpoint")))
    ways.append(way('"unchanged", memory="selective"', lambda: subject.unchanged("selective")))
    pairs = []
    for every in EVERY:
        theirs = way(f"gradient_checkpointing_enable(every_n_layers={every})", lambda n=every: subject.stock(n))  # type: ignore[misc]
        plan, ours = fitting_plan(subject, theirs.peak)
        pairs.append((theirs, way(f'"unchanged", {plan}', ours)))
        ways += pairs[-1]
    return ways, pairs


def fitting_plan(subject: Subject, budget: int) -> tuple[rg.Plan, Callable[[], None]]:
    """The plan with the most stored layers whose measured peak is within a budget, the last layers first."""
    subject.unchanged("checkpoint")
    depth = len(subject.conversion.stack)

    def plan_of(stored: int) -> rg.Plan:
        return rg.Plan(["checkpoint"] * (depth - stored) + ["store"] * stored)

    def is_too_large(stored: int) -> bool:
        subject.conversion.stack.memory = plan_of(stored)
        return subject.peak() > budget

    best = plan_of(bisect.bisect_left(range(1, depth + 1), True, key=is_too_large))
    return best, lambda: subject.unchanged(best)


def measure(subject: Subject, ways: list[Way], rounds: int) -> None:
    for _ in range(rounds):
        ways[0].enter()
        original = subject.seconds()
        for way in ways[1:]:
            way.enter()
            way.ratios.append(subject.seconds() / original)
    ways[0].ratios.append(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, to check that everything works")
    parser.add_argument("--bytes-only", action="store_true", help="no times: the peaks are the same on a busy machine")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else FULL
    before, question = load(), (__doc__ or "").split("\n\n")[2]
    lines = ['# The recipe "unchanged" beside gradient_checkpointing_enable', question, str(sizes)]
    lost = []
    for name, make in models(sizes).items():
        subject = Subject(make, sizes)
        ways, pairs = ways_of(subject)
        if not options.bytes_only:
            measure(subject, ways, sizes.rounds)
        rows = ["| way | peak | time, ratio to the original |", "|---|---|---|", *(way.row() for way in ways)]
        lines += [f"## {name}", "\n".join(rows)]
        sys.stderr.write("\n".join([f"## {name}", *rows, ""]))
        for theirs, ours in pairs:
            is_slower = bool(ours.ratios) and statistics.median(ours.ratios) > statistics.median(theirs.ratios)
            if ours.peak > theirs.peak or is_slower:
                lost.append(f"{name}: {ours.name} loses to {theirs.name}.")
    lines += ["## The machine", *describe(before, ["torch", "transformers"]), *lost]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "unchanged.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    sys.stderr.write("\n".join([*lost, f"Written to {options.output / 'unchanged.md'}", ""]))
    return 1 if lost and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
