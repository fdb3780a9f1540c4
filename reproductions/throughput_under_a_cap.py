"""Throughput by batch size where the activations may take only so many bytes.

The table has the form of that in Mangalam et al. (2022), "Reversible Vision Transformers": bytes per image, the
largest batch that fits, and the images per second at that batch. The cap is on the peak of live tensors as
`MemoryTracker` counts them, without parameters and their gradients.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

import retrograde as rg
from report import Page, Progress, quartiles, read_options, run, table
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.measure.pictures import style_of
from small_models import reversible, transformer

Memory: TypeAlias = Literal["store", "checkpoint", "reverse"]
MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")


@dataclass(frozen=True)
class Size:
    """The sizes of the images (`length` patches of `width` features), of the experiment, and of the cap in bytes."""

    length: int
    width: int
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    cap: int
    rounds: int


QUICK = Size(length=4, width=8, depths=(2, 6), batches=(1, 4), cap=2**16, rounds=2)
FULL = Size(length=16, width=48, depths=(12, 48, 96), batches=(1, 2, 4, 8, 16, 32, 64, 128), cap=32 * 2**20, rounds=5)


@dataclass
class Model:
    """A vision transformer's blocks on patches that are embedded already."""

    stack: rg.ReversibleSequence
    size: Size

    @classmethod
    def of(cls, depth: int, size: Size) -> Model:
        torch.manual_seed(0)
        stack = reversible()(transformer(size.width, depth))
        assert isinstance(stack, rg.ReversibleSequence)
        model = cls(stack, size)
        model.step(1, "store")  # so that there are gradients to ignore
        return model

    def images(self, batch: int) -> Tensor:
        return torch.randn(batch, self.size.length, self.size.width)

    def step(self, batch: int, memory: Memory) -> float:
        """Run a forward and a backward pass; the seconds it took."""
        images = self.images(batch)
        start = time.perf_counter()
        output = self.stack(images, memory=memory)
        assert isinstance(output, Tensor)
        output.square().mean().backward()
        return time.perf_counter() - start

    def peak(self, batch: int, memory: Memory) -> int:
        """The bytes of tensors alive at the peak of a step."""
        images = self.images(batch)
        with MemoryTracker(ignore=[self.stack, images]) as tracker:
            output = self.stack(images, memory=memory)
            assert isinstance(output, Tensor)
            output.square().mean().backward()
        return tracker.peak


def largest_batch(peak: Callable[[int], int], cap: int) -> int:
    """The largest batch whose peak is at most the cap, by measuring; 0 if one image is too much."""
    fits, too_large = 0, 1
    while peak(too_large) <= cap:
        fits, too_large = too_large, 2 * too_large
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if peak(middle) <= cap:
            fits = middle
        else:
            too_large = middle
    return fits


Seconds: TypeAlias = dict[tuple[int, Memory, int], list[float]]


@dataclass
class Measured:
    """By depth and memory: bytes per image at the largest batch, and that batch. By batch too: seconds of rounds."""

    per_image: dict[tuple[int, Memory], float]
    largest: dict[tuple[int, Memory], int]
    seconds: Seconds

    def throughput(self, depth: int, mode: Memory, batch: int) -> tuple[float, float, float] | None:
        """The quartiles of the images per second; None where the batch does not fit."""
        seconds = self.seconds.get((depth, mode, batch))
        return None if seconds is None else quartiles([batch / s for s in seconds])

    def best(self, depth: int, mode: Memory) -> str:
        """The most images per second at any batch that fits, and that batch."""
        batches = [b for d, m, b in self.seconds if (d, m) == (depth, mode)]
        rates = [(rate[1], b) for b in batches if (rate := self.throughput(depth, mode, b))]
        return "–" if not rates else "{:.1f} at batch {}".format(*max(rates))


def measure(chosen: Size) -> Measured:
    measured = Measured({}, {}, {})
    search = Progress("Largest batches", len(chosen.depths) * len(MODES))
    for depth in chosen.depths:
        model = Model.of(depth, chosen)
        for mode in MODES:
            largest = largest_batch(partial(model.peak, memory=mode), chosen.cap)
            measured.largest[depth, mode] = largest
            measured.per_image[depth, mode] = model.peak(max(1, largest), mode) / max(1, largest)
            search.step(f"the largest batch of {mode} at depth {depth}")
        fitting: list[tuple[Memory, int]] = [
            (mode, batch)
            for mode in MODES
            for batch in sorted({*chosen.batches, measured.largest[depth, mode]})
            if 0 < batch <= measured.largest[depth, mode]
        ]
        time_rounds(model, depth, fitting, measured.seconds)
    return measured


def time_rounds(model: Model, depth: int, fitting: list[tuple[Memory, int]], seconds: Seconds) -> None:
    """Run every mode and batch once per round: what slows one slows all."""
    progress = Progress(f"Depth {depth}, rounds", model.size.rounds + 1)
    gc.disable()  # a collection would count as time of the mode that runs
    try:
        for round_ in range(model.size.rounds + 1):
            for mode, batch in fitting:
                took = model.step(batch, mode)
                if round_:  # the first warms up
                    seconds.setdefault((depth, mode, batch), []).append(took)
            progress.step(f"{len(fitting)} combinations of memory and batch")
            gc.collect()
    finally:
        gc.enable()


def summary(chosen: Size, measured: Measured) -> str:
    rows = []
    for depth, mode in itertools.product(chosen.depths, MODES):
        largest = measured.largest[depth, mode]
        rates = measured.throughput(depth, mode, largest)
        rate = "–" if rates is None else f"{rates[1]:.1f} ({rates[0]:.1f} – {rates[2]:.1f})"
        rows.append(
            [
                depth,
                mode,
                format_bytes(round(measured.per_image[depth, mode])),
                largest,
                rate,
                measured.best(depth, mode),
            ]
        )
    head = [
        "depth",
        "memory",
        "bytes per image",
        "largest batch",
        "images/s at that batch (quartiles)",
        "best images/s",
    ]
    return table(head, rows)


def by_batch(chosen: Size, measured: Measured, depth: int) -> str:
    rows = []
    for batch in chosen.batches:
        rates = [measured.throughput(depth, mode, batch) for mode in MODES]
        rows.append([str(batch), *("over the cap" if rate is None else f"{rate[1]:.1f}" for rate in rates)])
    return table(["batch", *MODES], rows)


def draw(chosen: Size, measured: Measured) -> Callable[[Any], None]:
    def drawn(axes: Any) -> None:
        for panel, depth in zip(axes, chosen.depths, strict=True):
            for mode in MODES:
                batches = sorted(b for d, m, b in measured.seconds if (d, m) == (depth, mode))
                rates = [r[1] for b in batches if (r := measured.throughput(depth, mode, b))]
                colour, marker = style_of(mode)
                panel.semilogx(batches, rates, base=2, color=colour, marker=marker, label=mode)
            panel.set(xlabel="batch", ylabel="images/s", title=f"{depth} blocks", ylim=(0, None))
            panel.legend()

    return drawn


def main() -> None:
    options = read_options(__doc__)
    chosen = QUICK if options.quick else FULL
    page = Page("throughput_under_a_cap", "Throughput against batch size under a memory cap", options)
    measured = measure(chosen)
    page.add(
        f"Vision transformer blocks of width {chosen.width} on {chosen.length} patches per image, float32; activations "
        f"may take {format_bytes(chosen.cap)} at the peak of a step, without parameters and their gradients. Times are "
        f"of forward and backward, the median of {chosen.rounds} rounds in which every mode and batch ran once.",
        "Mangalam et al. (2022) measured the same on GPUs: the bytes per image that reversing saves grow with depth, "
        "and so does the batch that fits; where a small batch leaves the device idle, the larger one makes up for the "
        "time of the replay. Here the device is a CPU, on which a small batch pays the fixed cost of every operator.",
        summary(chosen, measured),
    )
    for depth in chosen.depths:
        page.add(f"## Images per second at depth {depth}", by_batch(chosen, measured, depth))
    page.draw(draw(chosen, measured), panels=len(chosen.depths))
    page.write()


if __name__ == "__main__":
    run(main)
