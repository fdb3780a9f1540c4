"""Eager compared with compiled: plain autograd, a stack, a stack of compiled branches, and a stack in one graph.

    python benchmarks/compiled.py                     # width 64, depth 12: some minutes, most of them compiling
    python benchmarks/compiled.py --width 8 --depth 2 --rounds 3

Every contender runs once per round, in an order that changes from round to round; ratios are computed within a round.
The gradients of all are compared first.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.drift import worst_error

Run = Callable[[Tensor], Tensor]
PLAIN = "plain, eager"


class Attention(nn.Module):
    """Causal self-attention of one head, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        update: Tensor = self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return update


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def contenders(width: int, depth: int) -> tuple[dict[str, Run], nn.ModuleList]:
    branches = nn.ModuleList(b for _ in range(depth) for b in (Attention(width), feed_forward(width)))
    pairs = list(zip(branches[::2], branches[1::2], strict=True))

    def plain(x: Tensor) -> Tensor:
        first = second = x
        for f, g in pairs:
            first = first + f(second)
            second = second + g(first)
        return (first + second) / 2

    def stack(compile_branch: Callable[..., nn.Module] = lambda branch: branch, **options: str) -> nn.Module:
        blocks = [rg.two_stream(compile_branch(f), compile_branch(g)) for f, g in pairs]
        return rg.ReversibleSequence(blocks, **options)  # type: ignore[arg-type]

    return {
        PLAIN: plain,
        "plain, compiled": torch.compile(plain, fullgraph=True),
        "reverse, eager": stack(),
        "reverse, compiled branches": stack(torch.compile),  # type: ignore[arg-type]
        "reverse, one graph": torch.compile(stack(compiled="single graph"), fullgraph=True),  # type: ignore[dict-item]
    }, branches


def step(run: Run, x: Tensor, branches: nn.Module) -> float:
    """The seconds of one forward and backward pass, from no gradients."""
    branches.zero_grad(set_to_none=True)
    start = time.perf_counter()
    run(x).square().mean().backward()
    return time.perf_counter() - start


def compare(runs: dict[str, Run], x: Tensor, branches: nn.Module) -> None:
    """Build everything, and stop if a contender has other gradients than plain autograd."""
    expected: list[Tensor] = []
    for name, run in runs.items():
        took = step(run, x, branches)
        gradients = [p.grad.clone() for p in branches.parameters() if p.grad is not None]
        expected = expected or gradients
        worst = worst_error(gradients, expected)
        print(f"  {name}: first call {took:.1f} s, gradients off by {worst:.1e}", flush=True)
        if worst > 1e-3:
            raise SystemExit(f"{name} has other gradients than {PLAIN}.")


def measure(runs: dict[str, Run], x: Tensor, branches: nn.Module, rounds: int) -> dict[str, list[float]]:
    order, shuffle = list(runs), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(step(runs[name], x, branches))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 64), ("depth", 12), ("length", 128), ("batch", 4), ("rounds", 25), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    runs, branches = contenders(options.width, options.depth)
    x = torch.randn(options.batch, options.length, options.width)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {vars(options)}")
    compare(runs, x, branches)
    seconds = measure(runs, x, branches, options.rounds)
    print(f"\n| contender | ms, median | ratio to {PLAIN}: median (quartiles) |\n|---|---|---|")
    for name, took in seconds.items():
        ratios = [one / plain for one, plain in zip(took, seconds[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {1000 * statistics.median(took):.2f} | {middle:.2f} ({low:.2f}–{high:.2f}) |")


if __name__ == "__main__":
    main()
