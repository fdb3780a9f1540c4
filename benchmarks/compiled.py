"""torch.compile(model, backend="retrograde"), compared with plain autograd, eager and compiled, and torch's own budget.

    python benchmarks/compiled.py                            # all tables; compiling takes most of the time
    python benchmarks/compiled.py --only time --width 8 --depth 2 --length 16 --rounds 3
    python benchmarks/compiled.py --only time --width 512 --length 512 --threads 2

Tables: "time" (interleaved rounds in an order that changes; ratios are computed within a round, with quartiles; peaks
from the profiler's memory events), the same with dropout and under bfloat16 autocast; "depth" (bytes saved per depth,
and the processor time of the first call without caches, each in a process of its own); "budget" (torch's activation
budget, at several values). Gradients are compared with plain autograd first, where nothing is random.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._functorch.config as functorch_config  # the only place of torch's budget, as read in torch 2.13
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import retrograde as rg
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


class Network:
    """Branches, and ways to run them."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.pairs = [(Attention(width), feed_forward(width, dropout)) for _ in range(depth)]
        self.branches = nn.ModuleList(branch for pair in self.pairs for branch in pair)

    def plain(self, x: Tensor) -> Tensor:
        first = second = x
        for f, g in self.pairs:
            first = first + f(second)
            second = second + g(first)
        return (first + second) / 2

    def compiled(self, budget: float = 1.0) -> Run:
        run = torch.compile(lambda x: self.plain(x), fullgraph=True)
        return _with_budget(run, budget)

    def stack(self) -> rg.ReversibleSequence:
        return rg.ReversibleSequence([rg.two_stream(f, g) for f, g in self.pairs])

    def by_rule(self) -> Run:
        return torch.compile(self.stack(), backend="retrograde", fullgraph=True)


def _with_budget(run: Any, budget: float) -> Run:
    def budgeted(x: Tensor) -> Tensor:
        with functorch_config.patch(activation_memory_budget=budget):
            y: Tensor = run(x)
        return y

    return budgeted


def step(run: Run, x: Tensor, branches: nn.Module, *, autocast: bool = False) -> float:
    """The seconds of one forward and backward pass, from no gradients."""
    branches.zero_grad(set_to_none=True)
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = run(x)
    y.float().square().mean().backward()
    return time.perf_counter() - start


def peak(run: Run, x: Tensor, branches: nn.Module, *, autocast: bool = False) -> float:
    """The peak of one step less the gradients it leaves, in units of one stream."""
    branches.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(run, x, branches, autocast=autocast)
    total = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            highest = max(highest, total)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in branches.parameters() if p.grad is not None)
    return (highest - gradients) / (x.numel() * x.element_size())


def compare(runs: dict[str, Run], x: Tensor, branches: nn.Module, *, is_random: bool, autocast: bool) -> None:
    """Build everything, and stop if a contender has other gradients than plain autograd."""
    expected: list[Tensor] = []
    for name, run in runs.items():
        took = step(run, x, branches, autocast=autocast)
        gradients = [p.grad.clone() for p in branches.parameters() if p.grad is not None]
        expected = expected or gradients
        worst = worst_error(gradients, expected)
        print(f"  {name}: first call {took:.1f} s, gradients off by {worst:.1e}", flush=True)
        if worst > (3e-2 if autocast else 1e-3) and not is_random:
            raise SystemExit(f"{name} has other gradients than {PLAIN}.")


def time_table(network: Network, runs: dict[str, Run], x: Tensor, options: Any, *, autocast: bool = False) -> None:
    order, shuffle = list(runs), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(step(runs[name], x, network.branches, autocast=autocast))
    print("\n| contender | ms, median | to plain eager (quartiles) | to plain compiled | peak less gradients, S |")
    print("|---|---|---|---|---|")
    for name, run in runs.items():
        cells = [_ratio(seconds[name], seconds[base]) if base in seconds else "–" for base in (PLAIN, COMPILED)]
        streams = peak(run, x, network.branches, autocast=autocast)
        print(f"| {name} | {1000 * statistics.median(seconds[name]):.2f} | {cells[0]} | {cells[1]} | {streams:.1f} |")


def _ratio(seconds: list[float], base: list[float]) -> str:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, base, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def times(options: Any) -> None:
    """Three settings: nothing random, dropout 0.1, and bfloat16 autocast."""
    x = torch.randn(options.batch, options.length, options.width)
    for title, dropout, autocast in (("no dropout", 0.0, False), ("dropout 0.1", 0.1, False), ("autocast", 0.0, True)):
        torch.compiler.reset()
        network = Network(options.width, options.depth, dropout)
        runs = {PLAIN: network.plain, COMPILED: network.compiled(), OURS: network.by_rule(), "eager": network.stack()}
        print(f"\n## {title}")
        compare(runs, x, network.branches, is_random=dropout > 0, autocast=autocast)
        time_table(network, runs, x, options, autocast=autocast)


def budgets(options: Any) -> None:
    """torch's activation budget on plain autograd, and our backend, in one interleaved run."""
    torch.compiler.reset()
    network, x = Network(options.width, options.depth), torch.randn(options.batch, options.length, options.width)
    runs = {PLAIN: network.plain, OURS: network.by_rule()}
    runs |= {f"torch's budget {budget}": network.compiled(budget) for budget in (1.0, 0.75, 0.5, 0.25, 0.0)}
    print("\n## torch's activation budget")
    compare(runs, x, network.branches, is_random=False, autocast=False)
    time_table(network, runs, x, options)


def depths(options: Any) -> None:
    """First calls and saved bytes over depth, each in a new process without caches."""
    print("\n## depth\n\n| depth | first call, s of processor time | bytes saved |\n|---|---|---|")
    for depth in (4, 8, 12, 48):
        command = [sys.executable, __file__, "--first-call", str(depth), "--width", str(options.width)]
        environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        print(result.stdout.strip().splitlines()[-1], flush=True)


def first_call(options: Any) -> None:
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
    network, x = Network(options.width, options.first_call), torch.randn(options.batch, options.length, options.width)
    start = time.process_time()
    step(network.by_rule(), x, network.branches)
    print(f"| {options.first_call} | {time.process_time() - start:.1f} | {saved[-1]:,} |")


TABLES = {"time": times, "depth": depths, "budget": budgets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 64), ("depth", 12), ("length", 128), ("batch", 4), ("rounds", 25), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=TABLES, action="append", help="only these tables")
    parser.add_argument("--first-call", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.first_call:
        first_call(options)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {vars(options)}")
    for name in options.only or TABLES:
        TABLES[name](options)


if __name__ == "__main__":
    main()
