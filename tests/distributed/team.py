"""Real processes for tests: started once, used by many cases, replaced after a case that fails or hangs.

    @in_processes(2)
    def test_gradients_agree(rank: int, option: str) -> None: ...

is a test whose body runs in two processes at once, in a process group (gloo) of its own. It passes if it passes in
both. `rank` is the process's; the other parameters are pytest's: fixtures that can be pickled, and parametrisations.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LIMIT = 60.0  # seconds for a case; the longest takes a tenth of it
START = 60.0  # seconds for a process to import torch, on a machine that is busy
PATIENCE = 5.0  # seconds for the others to notice that one of them has ended

# Warnings are errors, except for these of torch, which do not apply here.
IGNORED = [
    r"FSDP2-wrapped module \(.*\) returned a view tensor",  # it must not be edited in place: it is not
]


def in_processes(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test's body in `count` processes at once; see the module's docstring."""

    def wrap(case: Callable[..., None]) -> Callable[..., None]:
        def test(team: Team, store: Path, **given: Any) -> None:
            team.run(case, count, store, given)

        parameters = [p for p in inspect.signature(case).parameters.values() if p.name != "rank"]
        fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("team", "store")]
        named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        test.__signature__ = inspect.Signature([*fixtures, *named])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = case.__name__, case.__doc__, case.__module__
        test.case = case  # type: ignore[attr-defined]
        return test

    return wrap


class Task(NamedTuple):
    """A case to run: its module and name, its arguments, the number of processes, their store, and the time limit."""

    module: str
    name: str
    given: dict[str, Any]
    count: int
    store: str
    limit: float


class Team:
    """Worker processes by rank. They wait for cases and end with the process that started them."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self._members: list[Member] = []

    def run(self, case: Callable[..., None], count: int, store: Path, given: dict[str, Any]) -> None:
        """Run a case in `count` processes, and raise what any of them raised.

        If a process dies of a segmentation fault or an abort, in native code, the case runs a second time. It happens
        in one of some two hundred cases, while gloo's groups come and go in one process. A case that dies twice fails.
        """
        failures = self._attempt(case, count, store, given)
        if any(f"exit code {-number}" in f for f in failures for number in (signal.SIGSEGV, signal.SIGABRT)):
            sys.stderr.write(f"{case.__name__}: a process died in native code, and the case runs a second time\n")
            failures = self._attempt(case, count, store, given)
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def _attempt(self, case: Callable[..., None], count: int, store: Path, given: dict[str, Any]) -> list[str]:
        """Run a case once: the failures, by process."""
        while len(self._members) < count:
            self._members.append(Member(len(self._members)))
        members = self._members[:count]
        address = f"file://{store / uuid.uuid4().hex}"
        task = Task(case.__module__, case.__name__, given, count, address, self.limit)
        for member in members:
            member.wait_until_ready()
            member.pipe.send(task)
        deadline = time.monotonic() + self.limit
        failures = []
        for member in members:
            if report := member.report(deadline):
                failures.append(f"--- rank {member.rank} of {count} ---\n{report}")
                deadline = min(deadline, time.monotonic() + PATIENCE)
        if failures:
            self.stop()
        return failures

    def stop(self) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.pipe.close()
        self._members = []


class Member:
    """One process, and our end of the pipe to it."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._ready = False

    def wait_until_ready(self) -> None:
        if not self._ready:
            assert self.pipe.poll(START), f"Process {self.rank} took more than {START:.0f} s to start."
            self.pipe.recv()
            self._ready = True

    def report(self, deadline: float) -> str:
        """The report of the process on its case: a traceback, or nothing if it passed."""
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            return "no report: it hangs, or waits for another process that failed"
        try:
            return str(self.pipe.recv())
        except EOFError:
            self.process.join(PATIENCE)
            return f"the process ended, with exit code {self.process.exitcode}"


def serve(rank: int, pipe: Connection) -> None:
    """Run cases until the pipe closes, or until one of them fails."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    warnings.simplefilter("error")
    for message in IGNORED:
        warnings.filterwarnings("ignore", message=message)
    pipe.send("ready")
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        report = perform(task, rank)
        pipe.send(report)
        if report:
            os._exit(1)  # at once: others that wait for this process then fail too


def perform(task: Task, rank: int) -> str:
    """Run a case in a process group of its own; the traceback if it fails."""
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(0.9 * task.limit)
    try:
        test = getattr(importlib.import_module(task.module), task.name)
        case = getattr(test, "case", test)
        patience = timedelta(seconds=task.limit / 2)
        dist.init_process_group("gloo", init_method=task.store, rank=rank, world_size=task.count, timeout=patience)
        torch.manual_seed(0)
        case(**task.given, **({"rank": rank} if "rank" in inspect.signature(case).parameters else {}))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return ""
