"""The peak activation memory of a training step at two depths, stored and reversed, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from torch import Tensor, nn

from retrograde.measure import MemoryTracker

Memory = Literal["store", "reverse"]
MODES: tuple[Memory, ...] = ("store", "reverse")
Model = TypeVar("Model", bound=nn.Module)


def peak_of(model: Model, loss: Callable[[Model], Tensor]) -> int:
    """Bytes alive at the peak of a forward and a backward pass, without the parameters and their gradients."""
    loss(model).backward()  # so that there are gradients to ignore
    with MemoryTracker(ignore=[model]) as tracker:
        loss(model).backward()
    return tracker.peak


def print_memory(
    build: Callable[[int, Memory], Model], loss: Callable[[Model], Tensor], depths: tuple[int, int]
) -> None:
    """Measure models of two depths, which `build` makes, and print whether memory grows with depth."""
    print("\nActivation memory at the peak of a step (parameters and their gradients not counted):")
    print("  blocks" + "".join(f"{mode:>14}" for mode in MODES))
    peaks = {depth: [peak_of(build(depth, mode), loss) for mode in MODES] for depth in depths}
    for depth, row in peaks.items():
        print(f"  {depth:<6}" + "".join(f"{peak / 2**20:>10.2f} MiB" for peak in row))
    shallow, deep = depths
    for mode, before, after in zip(MODES, peaks[shallow], peaks[deep], strict=True):
        ratio = after / before
        word = "flat" if ratio < 1.05 else "grows"
        print(f"  {mode}: {word}, {ratio:.2f} times the memory for {deep / shallow:g} times the blocks")
