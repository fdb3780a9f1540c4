"""torch.compile(model, backend="retrograde"): its goals, each with the measured figure, in one dated report.

    python benchmarks/compiled.py                  # everything; writes benchmarks/results/<date>-compiled.md
    python benchmarks/compiled.py --quick          # a small model, few rounds: whether everything runs
    python benchmarks/compiled.py --only budget    # one table of: time, large, depth, budget

"time": tiny blocks, with nothing random, with dropout, under bfloat16 autocast. "large": width 512. "depth": the
first call (processor time, with that of the compilers it starts) and the bytes saved, each in a new process without
caches. "budget": torch's activation budget beside plans of ours. Contenders run interleaved, in an order that
changes; ratios are computed within a round, with quartiles; peaks come from the profiler's memory events. Gradients
are compared with plain autograd first, where nothing is random.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config  # the only place of torch's budget, as read in torch 2.13
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import retrograde as rg
from harness.compiled import with_own_code
from harness.machine import ROOT, Progress, describe, load
from retrograde.engine.drift import worst_error

Run = Callable[[Tensor], Tensor]
PLAIN, COMPILED, OURS = "plain, eager", "plain, compiled", 'backend="retrograde"'


class Attention(nn.Module):
    """Causal self-attention of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        update: Tensor = self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return update


def feed_forward(width: int, dropout: float = 0.0) -> nn.Module:
    parts = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*parts, *([nn.Dropout(dropout)] if dropout else []))


def _budgeted(run: Run, budget: float) -> Run:
    def budgeted(x: Tensor) -> Tensor:
        with functorch_config.patch(activation_memory_budget=budget):
            y: Tensor = run(x)
        return y

    return budgeted


class Network:
    """Branches, and ways to run them."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.dropout = dropout
        self.pairs = [(Attention(width), feed_forward(width, dropout)) for _ in range(depth)]
        self.branches = nn.ModuleList(branch for pair in self.pairs for branch in pair)

    def plain(self, x: Tensor) -> Tensor:
        first = second = x
        for f, g in self.pairs:
            first = first + f(second)
            second = second + g(first)
        return (first + second) / 2

    def compiled(self, budget: float = 1.0) -> Run:
        return _budgeted(torch.compile(with_own_code(lambda x: self.plain(x)), fullgraph=True), budget)

    def by_rule(self, stored: int = 0, budget: float = 1.0) -> Run:
        """Our backend; the first blocks store their activations (within torch's budget), the others are reversed."""
        plan = rg.Plan(["store"] * stored + ["reverse"] * (len(self.pairs) - stored))
        stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in self.pairs], memory=plan)
        own = with_own_code(lambda x: stack(x))
        return _budgeted(torch.compile(own, backend="retrograde", fullgraph=True), budget)


@dataclass
class Report:
    """Goals with what was measured, and tables."""

    goals: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    def goal(self, what: str, measured: str, wanted: str, *, is_met: bool) -> None:
        self.goals.append(f"| {what} | {measured} | {wanted} | {'yes' if is_met else '**no**'} |")
        self.progress.done(f"{what}: {measured} (goal {wanted})")


@dataclass
class Times:
    """Seconds and peaks (less gradients, in pairs of streams, S) of contenders that ran interleaved."""

    seconds: dict[str, list[float]]
    peaks: dict[str, float]

    def ratio(self, name: str, base: str) -> tuple[float, str]:
        """The median of the ratios within rounds, and it with its quartiles."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        return middle, f"{middle:.3f} ({low:.3f}–{high:.3f})"

    def table(self, title: str, bases: Sequence[str]) -> str:
        head = "| contender | ms, median | " + " | ".join(f"to {base}" for base in bases)
        lines = [f"## {title}", "", head + " | peak less gradients, S |", "|---" * (3 + len(bases)) + "|"]
        for name, seconds in self.seconds.items():
            ratios = " | ".join(self.ratio(name, base)[1] for base in bases)
            lines.append(f"| {name} | {1000 * statistics.median(seconds):.2f} | {ratios} | {self.peaks[name]:.1f} |")
        return "\n".join(lines)


def step(run: Run, x: Tensor, branches: nn.Module, *, autocast: bool = False) -> float:
    """The seconds of one forward and backward pass, from no gradients."""
    branches.zero_grad(set_to_none=True)
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = run(x)
    y.float().square().mean().backward()
    return time.perf_counter() - start


def peak(run: Run, x: Tensor, branches: nn.Module, *, autocast: bool = False) -> float:
    """The peak of one step less the gradients it leaves, in units of one pair of streams."""
    branches.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(run, x, branches, autocast=autocast)
    total = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            highest = max(highest, total)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in branches.parameters() if p.grad is not None)
    return (highest - gradients) / (2 * x.numel() * x.element_size())


def measure(
    network: Network, runs: dict[str, Run], x: Tensor, rounds: int, report: Report, *, autocast: bool = False
) -> Times:
    """Compile everything, compare gradients, and run the contenders in turns."""
    expected: list[Tensor] = []
    for name, run in runs.items():
        took = step(run, x, network.branches, autocast=autocast)
        gradients = [p.grad.clone() for p in network.branches.parameters() if p.grad is not None]
        expected = expected or gradients
        worst = worst_error(gradients, expected)
        report.progress.done(f"{name}: first call {took:.1f} s, gradients off by {worst:.1e}")
        if worst > (3e-2 if autocast else 1e-3) and not network.dropout:
            raise RuntimeError(f"{name} has other gradients than {PLAIN}: {worst:.1e}.")
    order, shuffle = list(runs), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        shuffle(order)
        for name in order:
            took = step(runs[name], x, network.branches, autocast=autocast)
            if round_:  # the first one is for warming up
                seconds[name].append(took)
    return Times(seconds, {name: peak(run, x, network.branches, autocast=autocast) for name, run in runs.items()})


def times(options: Any, report: Report) -> None:
    """Tiny blocks: nothing random, dropout 0.1, and bfloat16 autocast."""
    depth, rounds = (4, 5) if options.quick else (12, 60)
    x = torch.randn(2, 64, 64)
    for title, dropout, autocast in (("no dropout", 0.0, False), ("dropout 0.1", 0.1, False), ("autocast", 0.0, True)):
        torch.compiler.reset()
        network = Network(64, depth, dropout)
        runs = {PLAIN: network.plain, COMPILED: network.compiled(), OURS: network.by_rule()}
        result = measure(network, runs, x, rounds, report, autocast=autocast)
        report.tables.append(result.table(f"Tiny blocks (2 x 64 x 64, depth {depth}), {title}", (PLAIN, COMPILED)))
        base, limit = (COMPILED, 4 / 3) if dropout or autocast else (PLAIN, 1.03)
        (ratio, cell), streams = result.ratio(OURS, base), result.peaks[OURS]
        what = f"tiny blocks, depth {depth}, {title}: time to {base}; peak less gradients"
        most = 8.5 if base is PLAIN else math.inf  # no figure is set for the others
        wanted = f"≤ {limit:.2f}" + ("; ≤ 8.5 S" if base is PLAIN else "")
        report.goal(what, f"{cell}; {streams:.1f} S", wanted, is_met=ratio <= limit and streams <= most)


def large(options: Any, report: Report) -> None:
    """Width 512, length 512, on two threads."""
    width, depth, rounds = (64, 4, 3) if options.quick else (512, 12, 9)
    torch.compiler.reset()
    torch.set_num_threads(2)
    network, x = Network(width, depth), torch.randn(1, width, width)
    runs = {PLAIN: network.plain, COMPILED: network.compiled(), OURS: network.by_rule()}
    result = measure(network, runs, x, rounds, report)
    torch.set_num_threads(1)
    report.tables.append(result.table(f"Width {width}, length {width}, depth {depth}, two threads", (PLAIN, COMPILED)))
    ratio, cell = result.ratio(OURS, COMPILED)
    report.goal(f"width {width}, depth {depth}: time to {COMPILED}", cell, "≤ 1.34", is_met=ratio <= 1.34)


def budgets(options: Any, report: Report) -> None:
    """torch's activation budget on plain autograd, and plans of ours, in one interleaved run."""
    depth, rounds = (4, 5) if options.quick else (12, 60)
    torch.compiler.reset()
    network, x = Network(64, depth), torch.randn(2, 64, 64)
    given = [0.5, 0.0] if options.quick else [0.75, 0.5, 0.25, 0.0]
    theirs = {f"torch's budget {budget}": network.compiled(budget) for budget in given}
    ours = {f"{OURS}, store, budget {b}": network.by_rule(depth, b) for b in [1.0, *given]}
    ours |= {f"{OURS}, half of the blocks stored, budget 0.5": network.by_rule(depth // 2, 0.5)}
    ours |= {f"{OURS}, reverse": network.by_rule()}
    result = measure(network, {PLAIN: network.plain, **theirs, **ours}, x, rounds, report)
    report.tables.append(result.table(f"torch's activation budget and plans of ours, depth {depth}", (PLAIN,)))
    peaks = [result.peaks[name] for name in ours]
    falls = all(a >= b for a, b in pairwise(peaks))
    cells = " → ".join(f"{each:.1f}" for each in peaks)
    report.goal("our peaks, from a budget of 1.0 to 0.0, half reversed, reversed", cells + " S", "falls", is_met=falls)
    for name in theirs:
        fits = [plan for plan in ours if result.peaks[plan] <= result.peaks[name]]
        best = min(fits, key=lambda plan: result.ratio(plan, name)[0], default=None)
        ratio, cell = (float("inf"), "none fits") if best is None else result.ratio(best, name)
        what = f"{name} ({result.peaks[name]:.1f} S): time of our fastest plan at no larger peak"
        report.goal(what, f"{cell}, {best}", "< 1", is_met=ratio < 1)


def depths(options: Any, report: Report) -> None:
    """First calls and saved bytes over depth, each in a new process without caches."""
    found: dict[int, dict[str, float]] = {}
    lines = ["## Depth", "", "| depth | first call, s of processor time | of it in children | bytes saved |"]
    lines.append("|---|---|---|---|")
    for depth in (2, 4) if options.quick else (4, 8, 12, 48):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
            result = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, "--first-call", str(depth)],
                env={**os.environ, **environment}, capture_output=True, text=True, check=False,
            )  # fmt: skip
        if result.returncode:
            raise RuntimeError(f"The first call at depth {depth} failed: {result.stderr[-2000:]}")
        each = found[depth] = json.loads(result.stdout.splitlines()[-1])
        lines.append(f"| {depth} | {each['seconds']:.1f} | {each['children']:.1f} | {each['saved']:,} |")
        report.progress.done(lines[-1])
    report.tables.append("\n".join(lines))
    shallow, deep = (2, 4) if options.quick else (8, 48)
    ratio = found[deep]["seconds"] / found[shallow]["seconds"]
    report.goal(f"first call, depth {deep} to depth {shallow}", f"{ratio:.2f}", "≤ 2", is_met=ratio <= 2)
    saved = {each["saved"] for each in found.values()}
    cell = ", ".join(f"{each['saved']:,}" for each in found.values())
    report.goal(f"bytes saved at depth {', '.join(map(str, found))}", cell, "equal", is_met=len(saved) == 1)


def first_call(depth: int) -> None:
    """Compile once; print the processor time and the bytes that the graph saves."""
    from retrograde.compiled import backend

    saved: list[int] = []
    cut = backend.partition

    def counting(*args: Any, **kwargs: Any) -> Any:
        forward, backward = cut(*args, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        values = [n.meta["val"] for n in output.args[0][kwargs["num_fwd_outputs"] :] if n.op != "placeholder"]
        saved.append(sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor)))
        return forward, backward

    backend.partition = counting
    network, x = Network(64, depth), torch.randn(2, 64, 64)
    start = [_processor_seconds(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    step(network.by_rule(), x, network.branches)
    own, children = (
        _processor_seconds(who) - before
        for who, before in zip((resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN), start, strict=True)
    )
    print(json.dumps({"seconds": own + children, "children": children, "saved": saved[-1]}))


def _processor_seconds(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


TABLES = {"time": times, "large": large, "depth": depths, "budget": budgets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, action="append", help="only these tables")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", help="where to write the report"
    )
    parser.add_argument("--first-call", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first_call:
        first_call(options.first_call)
        return
    load_before, report = load(), Report()
    for name in options.only or TABLES:
        try:
            TABLES[name](options, report)
        except Exception:  # the other tables are worth having
            report.goal(f'table "{name}"', "failed, see below", "runs", is_met=False)
            report.tables.append(f"## {name}\n\n```\n{traceback.format_exc()}```")
    head = ["# Compiled stacks", "", *describe(load_before, ()), f"- took {report.progress.minutes:.1f} minutes", ""]
    goals = ["| | measured | goal | met |", "|---|---|---|---|", *report.goals]
    text = "\n".join([*head, *goals, "", "\n\n".join(report.tables)]) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{datetime.date.today()}-compiled.md"
    path.write_text(text)
    print(text)
    report.progress.done(f"written: {path}")


if __name__ == "__main__":
    main()
