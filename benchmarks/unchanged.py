"""The recipe "unchanged" beside `gradient_checkpointing_enable`: at equal memory the time, at equal time the memory.

    python benchmarks/unchanged.py [--quick] [--bytes-only] [--output DIR]

GPT-2-, Llama- and BERT-shaped models of Hugging Face Transformers with random weights, on one thread. A peak is an
exact count: the most bytes that a training step has alive in addition to the parameters and the batch, with gradients
that start as None, as after `optimizer.zero_grad()`. Times are processor time. Every way has a model of its own; in
each round every way runs one step, and ratios are taken within the round. For each setting of `every_n_layers` of
transformers there are two questions. Equal memory: of the plans whose measured peak is within that setting's peak, the
fastest by the planner's count. Equal time: of the plans that do no more work than that setting, by the planner's count,
the one with the smallest peak. The report goes to benchmarks/results/, with its date; the exit status is 1 if a plan is
slower or larger at equal memory.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products are illegal instructions on some CPUs

import torch
import transformers
from torch import Tensor, nn

import retrograde as rg
from harness.machine import describe, load
from retrograde.measure import format_bytes
from retrograde.measure.training_step import clear_gradients, loss_of, step_peak
from retrograde.planning import ChainCost, Planned, choose, measure, smallest

EVERY = (1, 2, 4)
"""The settings of `every_n_layers` that are compared with."""
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models and of the measurement."""

    width: int
    depth: int
    length: int
    samples: int
    vocabulary: int
    rounds: int


FULL = Sizes(width=384, depth=12, length=512, samples=1, vocabulary=2048, rounds=6)
QUICK = Sizes(width=32, depth=4, length=16, samples=1, vocabulary=64, rounds=2)


def models(sizes: Sizes) -> dict[str, Callable[[], nn.Module]]:
    common = {"vocab_size": sizes.vocabulary, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
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
    """One way to train a model: a copy of it that is trained so, its peak, and the seconds of its steps."""

    name: str
    model: nn.Module
    batch: Batch
    peak: int = 0
    seconds: list[float] = field(default_factory=list)

    def settle(self) -> Way:
        """Take the peak of a step that is not the first: in a first one the engine inspects the layers."""
        self.step()
        self.peak = step_peak(self.model, self.batch)
        return self

    def step(self) -> float:
        clear_gradients(self.model.parameters())
        start = time.process_time()
        loss_of(self.model, self.batch).backward()
        return time.process_time() - start

    def ratios(self, to: Way) -> list[float]:
        return [mine / other for mine, other in zip(self.seconds, to.seconds, strict=True)]


@dataclass(frozen=True)
class Pair:
    """A setting of transformers, and a plan that is compared with it."""

    question: str
    theirs: Way
    ours: Way

    def row(self) -> str:
        bytes_ratio = f"{self.ours.peak / self.theirs.peak:.3f}"
        times = "not measured"
        if self.ours.seconds:
            low, middle, high = statistics.quantiles(self.ours.ratios(self.theirs), n=4)
            times = f"**{middle:.3f}** ({low:.3f}-{high:.3f})"
        return f"| {self.theirs.name} | {self.question} | {self.ours.name} | {bytes_ratio} | {times} |"

    @property
    def is_lost(self) -> bool:
        is_slower = bool(self.ours.seconds) and statistics.median(self.ours.ratios(self.theirs)) > 1
        return self.question == "equal memory" and (self.ours.peak > self.theirs.peak or is_slower)


class Subject:
    """A model, of which every way gets a copy."""

    def __init__(self, make: Callable[[], nn.Module], sizes: Sizes) -> None:
        torch.manual_seed(0)
        self._model = make().train()
        tokens = torch.randint(1, sizes.vocabulary, (sizes.samples, sizes.length))
        self.batch: Batch = {"input_ids": tokens, "labels": tokens}
        self.depth = sizes.depth

    def stock(self, every: int | None = None) -> Way:
        """The original model, with its own checkpointing on every n-th layer, or without."""
        model: Any = copy.deepcopy(self._model)
        if every is None:
            return Way("original, everything stored", model, self.batch).settle()
        model.gradient_checkpointing_enable(every_n_layers=every)
        return Way(f"every_n_layers={every}", model, self.batch).settle()

    def unchanged(self, plan: rg.Plan) -> Way:
        model = copy.deepcopy(self._model)
        rg.convert(model, "unchanged", memory=plan)
        return Way(str(plan), model, self.batch).settle()

    def costs(self) -> ChainCost:
        """What the planner knows of the model."""
        model = copy.deepcopy(self._model)
        rg.convert(model, "unchanged")
        return measure(model, self.batch)

    def fastest(self, chain: ChainCost, budget: int) -> Way:
        """The fastest plan, by the planner's count, whose real peak is within a budget.

        Predicted peaks are a few percent off, so plans from a little above the budget downwards are run.
        """
        limit, least = budget + budget // 30, smallest(chain)
        while True:
            planned = choose(chain, max(limit, least))
            way = self.unchanged(planned.plan)
            if way.peak <= budget or limit <= least:
                return way
            limit = planned.peak - 1

    def smallest(self, chain: ChainCost, every: int) -> Way:
        """A step under the smallest plan that does no more work than checkpointing every n-th layer does."""
        modes = ["checkpoint" if i % every == 0 else "store" for i in range(self.depth)]
        allowed = work(chain, rg.Plan(modes))
        low, high = smallest(chain), chain_peak(chain)
        while high - low > high // 200:
            middle = (low + high) // 2
            if work(chain, choose(chain, middle).plan) <= allowed:
                high = middle
            else:
                low = middle
        return self.unchanged(choose(chain, high).plan)


def work(chain: ChainCost, plan: rg.Plan) -> float:
    return sum(chain.effort(i, mode) for i, mode in enumerate(plan.memory))


def chain_peak(chain: ChainCost) -> int:
    """The peak with everything stored."""
    stored: Planned = choose(chain, 1 << 60)
    return stored.peak


def pairs_of(subject: Subject) -> list[Pair]:
    chain, pairs = subject.costs(), []
    for every in EVERY:
        theirs = subject.stock(every)
        pairs.append(Pair("equal memory", theirs, subject.fastest(chain, theirs.peak)))
        pairs.append(Pair("equal time", theirs, subject.smallest(chain, every)))
    return pairs


def measured_rounds(ways: list[Way], rounds: int) -> None:
    for _ in range(rounds):
        for way in ways:
            way.seconds.append(way.step())


def report(name: str, original: Way, pairs: list[Pair]) -> str:
    """Two tables: every setting of transformers beside the original model, and ours beside it."""
    lines = [f"## {name}", "", "| transformers | peak | time, ratio to the original |", "|---|---|---|"]
    for way in [original, *dict.fromkeys(pair.theirs.name for pair in pairs)]:
        found = way if isinstance(way, Way) else next(pair.theirs for pair in pairs if pair.theirs.name == way)
        took = f"{statistics.median(found.ratios(original)):.3f}" if found.seconds else "not measured"
        lines.append(f"| {found.name} | {format_bytes(found.peak)} | {took} |")
    header = '| transformers | question | "unchanged" with the plan | peak, ratio | time, ratio: median (quartiles) |'
    lines += ["", header, "|---|---|---|---|---|", *(pair.row() for pair in pairs), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, to check that everything works")
    parser.add_argument("--bytes-only", action="store_true", help="no times: the peaks are the same on a busy machine")
    parser.add_argument("--only", default="", help="only the models with this in their name")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else FULL
    before, question = load(), (__doc__ or "").split("\n\n")[2]
    lines = ['# The recipe "unchanged" beside gradient_checkpointing_enable', question, str(sizes)]
    lost = []
    for name, make in models(sizes).items():
        if options.only not in name:
            continue
        subject = Subject(make, sizes)
        original, pairs = subject.stock(), pairs_of(subject)
        if not options.bytes_only:
            ways = {id(way): way for pair in pairs for way in (pair.theirs, pair.ours)}
            measured_rounds([original, *ways.values()], sizes.rounds)
        lines.append(report(name, original, pairs))
        sys.stderr.write(lines[-1] + "\n")
        lost += [f"{name}: {p.ours.name} loses to {p.theirs.name} at equal memory." for p in pairs if p.is_lost]
    lines += ["## The machine", *describe(before, ["torch", "transformers"]), *lost]
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{datetime.date.today()}-unchanged.md"
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    sys.stderr.write("\n".join([*lost, f"Written to {path}", ""]))
    return 1 if lost and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
