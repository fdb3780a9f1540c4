"""Resident memory: what the operating system gives a process, with the allocator's fragmentation and Python's objects.

Each figure is the peak of a fresh process (VmHWM) that runs one training step, less what it had before that step: the
interpreter, torch and the parameters. A step at depth 8 takes out what any step takes. The streams are 2 MiB a pair:
what a block costs beside its streams (the nodes of its graph, records, holes in the heap) is about 0.3 MiB.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHALLOW, DEEP = 8, 192
MIB = 2**20
STATUS = Path("/proc/self/status")


def memory_info(path: Path, field: str) -> int:
    """A figure in bytes of a file of /proc, or -1 where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), -1)


def growth(memory: str) -> int:
    """By how much the peak of a step grows from the shallow to the deep stack."""
    peaks = []
    for depth in (SHALLOW, DEEP):
        command = [sys.executable, __file__, memory, str(depth)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        peaks.append(int(run.stdout.split()[-1]))
    return peaks[1] - peaks[0]


@pytest.mark.slow
@pytest.mark.skipif(memory_info(STATUS, "VmHWM") < 0, reason="no /proc that tells a process's peak")
@pytest.mark.skipif(
    memory_info(Path("/proc/meminfo"), "MemAvailable") < 6144 * MIB, reason="stored activations need 4 GiB to spare"
)
def test_peak_resident_memory_grows_by_at_most_2_percent_of_what_stored_activations_take() -> None:
    stored, reverse = growth("store"), growth("reverse")
    assert stored > 1000 * MIB
    assert reverse <= 0.02 * stored, f"reverse grows by {reverse / MIB:.1f} MiB, store by {stored / MIB:.1f} MiB"


def train_one_step(memory: str, depth: int) -> int:
    """Run in a process of its own: the bytes by which the peak of one step exceeds what was there before it."""
    import torch

    from test_memory import stack

    torch.set_num_threads(1)
    model, x = stack(depth, memory), torch.randn(512, 32, 16)
    before = memory_info(STATUS, "VmRSS")
    model(x).sum().backward()
    return memory_info(STATUS, "VmHWM") - before


if __name__ == "__main__":
    sys.stdout.write(f"{train_one_step(sys.argv[1], int(sys.argv[2]))}\n")
