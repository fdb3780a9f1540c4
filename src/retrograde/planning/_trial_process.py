"""One trial of `fit` as a process: started, watched, and ended when it passes the limit.

NOTE [What is measured]
 On an accelerator: the most bytes that its allocator had reserved, with the limit set in the allocator itself.
 On the CPU: the peak of the process's resident memory (VmHWM of Linux), which includes the interpreter, torch, the
 weights and the optimiser's state, as the kernel counts them against a container's limit. A process that passes the
 limit is ended at once. RLIMIT_AS and RLIMIT_DATA count addresses, not memory: 470 and 90 MiB more than was in use, in
 a process of 794 MiB. With glibc's default settings the peak of the same run varied from 569 to 610 MiB; where
 buffers of 1 MiB and more are returned to the system at once (MALLOC_MMAP_THRESHOLD_), it was 470 or 471: trials set
 that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ._trial import is_out_of_memory, peak_resident

_POLL = 0.02
_TRIAL = "from retrograde.planning._trial import run; run()"
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # a user's own setting has precedence


class TrialError(RuntimeError):
    """A trial failed for another reason than memory, so that no size can be found."""


def run_trial(arguments: dict[str, Any], timeout: float) -> tuple[bool, int | None]:
    """Start the process, end it when it passes the limit, and read its report: whether it fits, and its peak."""
    limit = arguments["memory_limit"]
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder, "report.json"), Path(folder, "errors.txt")
        command = [sys.executable, "-c", _TRIAL, json.dumps({**arguments, "report": str(report)})]
        path = os.pathsep.join([entry or os.getcwd() for entry in sys.path])
        environment = {**_ALLOCATOR, **os.environ, "PYTHONPATH": path}
        with errors.open("wb") as stream:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stream)
            try:
                seen = _wait(process, limit, timeout)
            finally:
                process.kill()
                process.wait()
        if seen > limit:
            return False, seen
        if not report.exists():
            return _died(process.returncode, errors.read_text(errors="replace")), None
        result = json.loads(report.read_text(encoding="utf-8"))
    if result["outcome"] == "failed":
        raise TrialError(result["error"])
    if result["outcome"] == "out of memory":
        return False, None
    return result["peak"] <= limit, result["peak"]


def _wait(process: subprocess.Popen[bytes], limit: int, timeout: float) -> int:
    """Wait for the process; on the CPU, until its resident memory passes the limit. Returns the peak that was seen."""
    until, seen = time.monotonic() + timeout, 0
    status = None if torch.accelerator.is_available() else Path(f"/proc/{process.pid}/status")
    while process.poll() is None and seen <= limit:
        if time.monotonic() > until:
            raise TrialError(
                f"it took longer than {timeout:.0f} s. Give it more time, or a smaller upper bound (high)."
            )
        if status is not None:
            try:
                seen = peak_resident(status)
            except OSError:  # it has just ended
                break
        time.sleep(_POLL)
    return seen


def _died(returncode: int, errors: str) -> bool:
    """Of a process that ended without a report: False if it ran out of memory; raises if it ended otherwise."""
    if -returncode == signal.SIGKILL or is_out_of_memory(RuntimeError(errors)):
        return False
    cause = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "it wrote nothing")
    raise TrialError(f"its process ended with {cause}: {last}")
