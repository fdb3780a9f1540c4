"""Activation memory by depth, up to 1,000 layers: bytes of live tensors, and resident memory of fresh processes.

A layer is a transformer block of two branches, attention and feed-forward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

import retrograde as rg
from report import Page, Progress, read_options, run, table
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.measure.pictures import style_of
from small_models import reversible, transformer

Memory: TypeAlias = Literal["store", "checkpoint", "reverse"]
MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")
STATUS = Path("/proc/self/status")
LIMIT = 6 * 2**30  # settings that need more are not run


@dataclass(frozen=True)
class Setting:
    depth: int
    memory: Memory
    width: int
    length: int
    batch: int

    def build(self) -> tuple[rg.ReversibleSequence, Tensor]:
        torch.manual_seed(0)
        stack = reversible(memory=self.memory)(transformer(self.width, self.depth, heads=2))
        assert isinstance(stack, rg.ReversibleSequence)
        return stack, torch.randn(self.batch, self.length, self.width)


def live(setting: Setting) -> tuple[int, int]:
    """The bytes of tensors alive after the forward pass and at the peak of the backward, without gradients."""
    stack, x = setting.build()
    stack(x).sum().backward()  # so that there are gradients to ignore
    with MemoryTracker(ignore=[stack, x]) as tracker:
        loss = stack(x).sum()
        after_forward = tracker.live
        with tracker.phase("backward") as backward:
            loss.backward()
    return after_forward, backward.peak


def resident(setting: Setting) -> int | None:
    """By how much a step raises the resident peak of a fresh process, without the gradients; None if unknown."""
    if not STATUS.exists():
        return None
    command = [sys.executable, __file__, "--resident", json.dumps(asdict(setting))]
    library = str(Path(rg.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    return int(done.stdout.split()[-1])


def measure_resident(setting: Setting) -> int:
    """Measure in this process, which is a new one."""
    torch.set_num_threads(1)
    small, y = replace(setting, depth=2, batch=1).build()
    small(y).sum().backward()  # so that everything that torch loads at first use is loaded
    stack, x = setting.build()
    before = _status("VmRSS")
    stack(x).sum().backward()
    gradients = sum(p.grad.nbytes for p in stack.parameters() if p.grad is not None)
    return _status("VmHWM") - before - gradients


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


Measured: TypeAlias = dict[tuple[Memory, int], Any]


def sweep(
    measure: Callable[[Setting], Any], settings: list[Setting], label: str, *, expect: Callable[[Setting], float]
) -> Measured:
    """Measure each mode and depth, except for those that would need more than the limit."""
    progress, measured = Progress(label, len(settings)), {}
    for setting in settings:
        if expect(setting) <= LIMIT:
            measured[setting.memory, setting.depth] = measure(setting)
        progress.step(f"{setting.memory} at depth {setting.depth}")
    return measured


def rows(measured: Measured, depths: list[int], pick: Callable[[Any], int | None]) -> list[list[str]]:
    """One row per mode: its bytes at each depth, and the bytes per layer between the last two."""
    table_rows = []
    for mode in MODES:
        taken = [pick(measured[mode, depth]) if (mode, depth) in measured else None for depth in depths]
        cells = ["not run" if bytes_ is None else format_bytes(bytes_) for bytes_ in taken]
        points = [(depth, bytes_) for depth, bytes_ in zip(depths, taken, strict=True) if bytes_ is not None]
        slope = "–"
        if len(points) > 1:
            (shallow, less), (deep, more) = points[-2:]
            slope = format_bytes(round((more - less) / (deep - shallow)))
        table_rows.append([mode, *cells, slope])
    return table_rows


def expected(measured: Measured, depths: list[int]) -> Callable[[Setting], float]:
    """The peak to expect, from the live bytes at the first two depths."""

    def expect(setting: Setting) -> float:
        peaks = [measured[setting.memory, depth][1] for depth in depths[:2]]
        return float(peaks[0] + (peaks[1] - peaks[0]) / (depths[1] - depths[0]) * (setting.depth - depths[0]))

    return expect


def draw(depths: list[int], live_bytes: Measured) -> Callable[[Any], None]:
    def drawn(axes: Any) -> None:
        for mode in MODES:
            measured = [depth for depth in depths if (mode, depth) in live_bytes]
            colour, marker = style_of(mode)
            peaks = [live_bytes[mode, depth][1] / 2**20 for depth in measured]
            axes[0].loglog(measured, peaks, color=colour, marker=marker, label=mode)
        axes[0].set(xlabel="layers", ylabel="MiB at the peak of a step", title="Activation memory")
        axes[0].legend()

    return drawn


def main() -> None:
    options = read_options(__doc__)
    depths = [2, 6] if options.quick else [10, 100, 300, 1000]
    width, length, batch = (8, 4, 2) if options.quick else (32, 64, 32)
    page = Page("memory_by_depth", "Activation memory by depth", options)
    settings = [Setting(depth, mode, width, length, batch) for depth in depths for mode in MODES]
    first, rest = settings[: 2 * len(MODES)], settings[2 * len(MODES) :]
    live_bytes = sweep(live, first, "Live bytes, the first depths", expect=lambda _: 0)
    expect = expected(live_bytes, depths)
    if rest:
        live_bytes |= sweep(live, rest, "Live bytes, the others", expect=expect)
    fresh = settings[-1:] if options.quick else settings  # processes take seconds to start
    resident_bytes = sweep(resident, fresh, "Resident memory", expect=expect)
    pair = 2 * batch * length * width * 4
    page.add(
        f"Transformer blocks of width {width}, length {length}, batch {batch}, float32: a pair of streams takes "
        f"{format_bytes(pair)}. Settings that need more than {format_bytes(LIMIT)} were not run. Parameters and their "
        "gradients are not counted; they grow with depth in every mode. The last column is what a layer adds between "
        "the last two depths."
    )
    head = ["memory", *(f"{depth:,} layers" for depth in depths), "added per layer"]
    page.add("## After the forward pass", table(head, rows(live_bytes, depths, lambda bytes_: int(bytes_[0]))))
    page.add("## Peak of the backward pass", table(head, rows(live_bytes, depths, lambda bytes_: int(bytes_[1]))))
    page.add(
        "## Resident memory",
        "By how much one step raises the peak of a fresh process, without the gradients: with Python's objects, the "
        "nodes of the graph and the fragmentation of the heap, with the default allocator.",
        table(head, rows(resident_bytes, depths, lambda bytes_: bytes_)),
    )
    page.draw(draw(depths, live_bytes))
    page.write()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--resident"]:
        sys.stdout.write(f"{measure_resident(Setting(**json.loads(sys.argv[2])))}\n")
    else:
        run(main)
