"""The training script of the examples, started as users start it: with python, with torchrun, and as several nodes."""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "distributed_training.py")
LIMIT = 120.0  # seconds for a run, with a restart


class Launched:
    """A running command: its lines as they are printed, and the processes in which the script says that it runs."""

    def __init__(self, *command: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the script's docstring says why
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines: list[str] = []
        self._deadline = time.monotonic() + LIMIT
        self._coming: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._coming.put(line.rstrip("\n"))
        self._coming.put(None)

    def next_line(self) -> str | None:
        """The next line, or None after the last."""
        try:
            line = self._coming.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"Nothing was printed in time. So far:\n{self.text}") from None
        if line is not None:
            self.lines.append(line)
        return line

    def wait_for_step(self, step: int) -> None:
        """Read until a step, or a later one, was done."""
        while (line := self.next_line()) is not None:
            if (match := re.match(r"  step +(\d+)/", line)) and int(match[1]) >= step:
                return
        raise AssertionError(f"The run ended before step {step}:\n{self.text}")

    def wait_for_start(self, count: int) -> None:
        """Read until so many processes have started."""
        while len(self.starts()) < count and self.next_line() is not None:
            pass
        assert len(self.starts()) == count, self.text

    def starts(self) -> list[tuple[int, int, int]]:
        """Of each process so far: its rank, its id, and the step that it started from."""
        matches = re.findall(r"^rank (\d+) of \d+, .*: process (\d+), from step (\d+)$", self.text, re.MULTILINE)
        return [(int(rank), int(process), int(step)) for rank, process, step in matches]

    def finish(self) -> str:
        """Read to the end, check the exit status, and return what was printed."""
        while self.next_line() is not None:
            pass
        assert self.process.wait(timeout=30) == 0, self.text
        return self.text

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave no process behind."""
        if self.process.poll() is None:
            self.process.terminate()  # torchrun ends its processes then
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        for _, process, _ in self.starts():
            if SCRIPT in command_of(process):
                os.kill(process, signal.SIGKILL)
        self._reader.join(timeout=20)


def command_of(process: int) -> str:
    """The command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def torchrun(processes: int, *arguments: str, launcher: tuple[str, ...] = ("--standalone",)) -> Launched:
    return Launched(
        "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes), "--max-restarts", "3",
        SCRIPT, *arguments,
    )  # fmt: skip


def nodes(processes: int, *arguments: str) -> tuple[Launched, Launched]:
    """Two agents of torchrun that find each other at a loopback address, each with an address of its own."""
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = (
        torchrun(
            processes, *arguments,
            launcher=("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", endpoint,
                      "--rdzv-conf", f"is_host={host}", "--local-addr", address),
        )
        for host, address in ((1, "127.0.0.1"), (0, "127.0.0.2"))
    )  # fmt: skip
    return first, second


def free_port() -> int:
    """A free port, below the range from which systems pick ports by themselves."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def final_loss(text: str) -> float:
    return float(re.findall(r"^  step .* loss ([\d.]+)", text, re.MULTILINE)[-1])


def same_bits(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same contents: model, optimiser and step."""
    first, second = (
        torch.utils._pytree.tree_flatten_with_path(torch.load(p, weights_only=True))[0] for p in (one, other)
    )
    return len(first) > 10 and all(
        path == path_too and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for (path, a), (path_too, b) in zip(first, second, strict=True)
    )
