"""The terminal interface of all examples: options, progress, and a clean end on Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """`small` makes everything small enough for a test; the result is then not meaningful."""

    small: bool
    steps: int
    seed: int


def read_options(description: str | None, *, steps: int, small_steps: int = 8) -> Options:
    """Read the options of the command line, and set the seed; a bad option ends the program with a message."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="run for a few seconds instead of a minute, to check that it works"
    )
    parser.add_argument("--steps", type=_positive, help=f"training steps (default: {steps}, small: {small_steps})")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random numbers (default: 0)")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # the matrices are too small for several threads
    return Options(given.small, given.steps or (small_steps if given.small else steps), given.seed)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


class Progress:
    """One line that is overwritten on a terminal; elsewhere a plain line at each quarter."""

    def __init__(self, label: str, steps: int) -> None:
        self.label = label
        self.steps = steps
        self.start = time.perf_counter()
        self.live = sys.stdout.isatty()

    def show(self, step: int, loss: float) -> None:
        left = (time.perf_counter() - self.start) / step * (self.steps - step)
        line = f"  {self.label:<18} step {step:>4}/{self.steps}  loss {loss:.4f}  {left:>3.0f} s left"
        if self.live:
            print(f"\r{line}", end="\n" if step == self.steps else "", flush=True)
        elif step % max(1, self.steps // 4) == 0:
            print(line, flush=True)


def run(main: Callable[[], None]) -> None:
    """Run an example to its end, or until Ctrl-C."""
    start = time.perf_counter()
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped.")
        sys.exit(130)  # as a shell reports an interrupt
    print(f"\n{time.perf_counter() - start:.0f} s in all, torch {torch.__version__}, one thread.")
