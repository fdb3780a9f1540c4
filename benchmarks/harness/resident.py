"""Peak resident memory of a training step in a fresh process, with Python's objects and the heap's fragmentation.

    python -m harness.resident <contender> <setting as JSON>

prints the bytes by which the peak (VmHWM) exceeds the resident memory before the step, which includes parameters.
Gradients are subtracted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import retrograde

from .machine import Progress
from .settings import Setting, Sweep

STATUS = Path("/proc/self/status")
FOLDER = Path(__file__).resolve().parent.parent
Allocator = Literal["default", "tight"]
# glibc keeps freed memory for later, fragmented by the gradients, except for buffers above a threshold.
ALLOCATORS: dict[Allocator, dict[str, str]] = {"default": {}, "tight": {"MALLOC_MMAP_THRESHOLD_": "65536"}}


def status(field: str) -> int:
    """A figure of this process in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def measure(name: str, setting: Setting) -> int:
    """Measure in this process, which is a new one. After a small step: what is loaded on first use does not count."""
    import torch

    from .contenders import OURS_AND_TORCH
    from .peers import PEERS

    torch.set_num_threads(1)
    [build] = [contender.build for contender in (*OURS_AND_TORCH, *PEERS) if contender.name == name]
    small = dataclasses.replace(setting, depth=2, batch=1).build()
    build(small)(small.x).sum().backward()
    network = setting.build()
    run = build(network)
    before = status("VmRSS")
    run(network.x).sum().backward()
    gradients = sum(leaf.grad.nbytes for leaf in network.leaves if leaf.grad is not None)
    return status("VmHWM") - before - gradients


def in_fresh_process(name: str, setting: Setting, allocator: Allocator = "default") -> int | str:
    """The bytes, or the reason why there are none."""
    command = [sys.executable, "-m", "harness.resident", name, json.dumps(dataclasses.asdict(setting))]
    library = str(Path(retrograde.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **ALLOCATORS[allocator]}
    run = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        return (run.stderr.strip().splitlines() or [f"ended with {run.returncode}"])[-1][:200]
    return int(run.stdout.split()[-1])


def by_depth(
    sweep: Sweep, names: Sequence[str], progress: Progress, allocator: Allocator = "default"
) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
    """For each contender its peak at each depth; and who is absent, with the reason. Two processes at a time."""
    if not STATUS.exists():
        return {}, dict.fromkeys(names, "this system does not report a process's peak")
    jobs = [(name, depth) for depth in sweep.depths for name in names]
    peaks: dict[str, dict[int, int]] = {}
    absent: dict[str, str] = {}
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda job: in_fresh_process(job[0], sweep.at(job[1]), allocator), jobs)
        for (name, depth), result in zip(jobs, results, strict=True):
            progress.step(f"resident memory, allocator {allocator}: {name} at depth {depth}")
            if isinstance(result, str):
                absent[name] = result
            else:
                peaks.setdefault(name, {})[depth] = result
    return peaks, absent


if __name__ == "__main__":
    print(measure(sys.argv[1], Setting(**json.loads(sys.argv[2]))))
