"""How often a steady training step changes between files of the package, per step of a block.

    python benchmarks/file_changes.py

A reader follows these changes to understand what happens to one step. A change is a call of a function in another file
than that of the call before it; files outside of the package (torch, branches) do not count and do not interrupt. The
figures are the slope between two depths, so that the fixed part of a call of the stack does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

PACKAGE = str(Path(rg.__file__).resolve().parent)
DEPTHS = (8, 16)
STEPS_PER_BLOCK = 2
WARM_UP = 3  # calls, after which nothing is learned about the branches any more
WIDTH = 4


class FileChanges:
    """Counts changes of file while it is the profile function of a thread."""

    def __init__(self) -> None:
        self.count = 0
        self.files: set[str] = set()
        self._current = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file != self._current and file.startswith(PACKAGE):
            self._current = file
            self.files.add(file)
            self.count += 1


@contextmanager
def counting() -> Iterator[FileChanges]:
    """Count the changes of what runs inside, on this thread; a backward pass on the CPU runs there too."""
    changes = FileChanges()
    sys.setprofile(changes)
    try:
        yield changes
    finally:
        sys.setprofile(None)


def stack_of(depth: int, mode: Any, *, exact: bool) -> rg.ReversibleSequence:
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)]
    return rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=mode, exact=exact)


def training_step(stack: Callable[[Tensor], Any], x: Tensor) -> tuple[FileChanges, FileChanges]:
    """The changes of the forward and of the backward pass."""
    with counting() as forward:
        loss = stack(x).sum()
    with counting() as backward:
        loss.backward()
    return forward, backward


def steady_step(depth: int, mode: Any, *, exact: bool) -> tuple[FileChanges, FileChanges]:
    """The changes of a training step, after some others."""
    stack, x = stack_of(depth, mode, exact=exact), torch.randn(2, WIDTH)
    for _ in range(WARM_UP):
        stack(x).sum().backward()
    return training_step(stack, x)


def changes_per_step(mode: Any, exact: bool) -> tuple[float, float]:
    """The changes of file per step of a block, forward and backward."""
    shallow, deep = (steady_step(depth, mode, exact=exact) for depth in DEPTHS)
    steps = STEPS_PER_BLOCK * (DEPTHS[1] - DEPTHS[0])
    forward, backward = ((more.count - less.count) / steps for less, more in zip(shallow, deep, strict=True))
    return forward, backward


def main() -> None:
    print("| mode | forward | backward | files crossed, forward + backward |\n|---|---|---|---|")
    for name, exact in (("reverse", False), ("reverse, exact", True)):
        forward, backward = changes_per_step("reverse", exact)
        files = [len(changes.files) for changes in steady_step(DEPTHS[0], "reverse", exact=exact)]
        print(f"| {name} | {forward:.1f} | {backward:.1f} | {files[0]} + {files[1]} |")


if __name__ == "__main__":
    main()
