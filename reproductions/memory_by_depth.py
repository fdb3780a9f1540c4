"""Activation memory against depth, to 1,000 layers: bytes of live tensors, and resident memory of fresh processes.

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
from report import Page, Progress, read_options, run, size, table
from retrograde.diagnose import MemoryTracker
from small_models import reversible, transformer

Memory: TypeAlias = Literal["store", "checkpoint", "reverse"]
MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")
STATUS = Path("/proc/self/status")
LIMIT = 6 * 2**30  # what takes more is not run


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
    """The bytes of tensors alive after the forward pass and at the peak of the backward, less parameters' gradients."""
    stack, x = setting.build()
    stack(x).sum().backward()  # so that the gradients are there to be ignored
    with MemoryTracker(ignore=[stack, x]) as tracker:
        loss = stack(x).sum()
        held: int = tracker.live
        with tracker.phase("backward") as backward:
            loss.backward()
    peak: int = backward.peak
    return held, peak


def resident(setting: Setting) -> int | None:
    """By how much a step raises the resident peak of a fresh process, less the gradients; None if nobody tells."""
    if not STATUS.exists():
        return None
    command = [sys.executable, __file__, "--resident", json.dumps(asdict(setting))]
    library = str(Path(rg.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    return int(done.stdout.split()[-1])


def measure_resident(setting: Setting) -> int:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    small, y = replace(setting, depth=2, batch=1).build()
    small(y).sum().backward()  # so that what torch loads at the first use is there
    stack, x = setting.build()
    before = _status("VmRSS")
    stack(x).sum().backward()
    gradients = sum(p.grad.nbytes for p in stack.parameters() if p.grad is not None)
    return _status("VmHWM") - before - gradients


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


Found: TypeAlias = dict[tuple[Memory, int], Any]


def sweep(
    measure: Callable[[Setting], Any], settings: list[Setting], label: str, *, expect: Callable[[Setting], float]
) -> Found:
    """What was measured for each mode and depth, but for what would take more than the limit."""
    progress, found = Progress(label, len(settings)), {}
    for setting in settings:
        if expect(setting) <= LIMIT:
            found[setting.memory, setting.depth] = measure(setting)
        progress.step(f"{setting.memory} at depth {setting.depth}")
    return found


def rows(found: Found, depths: list[int], pick: Callable[[Any], int | None]) -> list[list[str]]:
    """A row a mode: its bytes at each depth, and what a layer adds between the last two."""
    table_rows = []
    for mode in MODES:
        taken = [pick(found[mode, depth]) if (mode, depth) in found else None for depth in depths]
        cells = ["not run" if bytes_ is None else size(bytes_) for bytes_ in taken]
        known = [(depth, bytes_) for depth, bytes_ in zip(depths, taken, strict=True) if bytes_ is not None]
        slope = "–"
        if len(known) > 1:
            (shallow, less), (deep, more) = known[-2:]
            added = (more - less) / (deep - shallow)
            slope = size(added) if added >= 0 else f"−{size(-added)}"
        table_rows.append([mode, *cells, slope])
    return table_rows


def expected(found: Found, depths: list[int]) -> Callable[[Setting], float]:
    """The peak to expect, from the live bytes at the first two depths."""

    def expect(setting: Setting) -> float:
        peaks = [found[setting.memory, depth][1] for depth in depths[:2]]
        return float(peaks[0] + (peaks[1] - peaks[0]) / (depths[1] - depths[0]) * (setting.depth - depths[0]))

    return expect


def draw(depths: list[int], live_bytes: Found) -> Callable[[Any], None]:
    def drawn(axes: Any) -> None:
        for mode in MODES:
            known = [depth for depth in depths if (mode, depth) in live_bytes]
            axes[0].loglog(known, [live_bytes[mode, d][1] / 2**20 for d in known], "o-", label=mode)
        axes[0].set(xlabel="layers", ylabel="MiB at the peak of a step", title="Activation memory")
        axes[0].legend()

    return drawn


def main() -> None:
    options = read_options(__doc__)
    depths = [2, 6] if options.quick else [10, 100, 300, 1000]
    width, length, batch = (8, 4, 2) if options.quick else (32, 64, 32)
    page = Page("memory_by_depth", "Activation memory against depth", options)
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
        f"{size(pair)}. What would take more than {size(LIMIT)} was not run. Parameters and their gradients are not "
        "counted; they grow with depth in every mode. The last column is what a layer adds between the last two "
        "depths."
    )
    head = ["memory", *(f"{depth:,} layers" for depth in depths), "added by a layer"]
    page.add("## Held after the forward pass", table(head, rows(live_bytes, depths, lambda found: int(found[0]))))
    page.add("## Peak of the backward pass", table(head, rows(live_bytes, depths, lambda found: int(found[1]))))
    page.add(
        "## Resident memory",
        "By how much one step raises the peak of a fresh process, less the gradients: with Python's objects, the "
        "nodes of the graph and the holes in the heap, and the allocator as it comes.",
        table(head, rows(resident_bytes, depths, lambda found: found)),
    )
    page.draw(draw(depths, live_bytes))
    page.write()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--resident"]:
        sys.stdout.write(f"{measure_resident(Setting(**json.loads(sys.argv[2])))}\n")
    else:
        run(main)
