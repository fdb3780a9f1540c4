"""The harness itself: a case that fails or hangs in one process fails as a whole, and leaves no process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from team import Team, in_processes


def fails_in_one(rank: int) -> None:
    if rank == 1:
        raise ArithmeticError("one and one is three")
    dist.barrier()


def hangs_in_one(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def dies_in_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@pytest.mark.parametrize(
    ("case", "report"),
    [
        (fails_in_one, "one and one is three"),
        (hangs_in_one, r"rank 1 of 2 ---\nno report: it hangs"),
        (dies_in_one, "exit code -11"),
    ],
)
def test_a_case_that_goes_wrong_in_one_process_fails(case, report: str, store: Path) -> None:  # type: ignore[no-untyped-def]
    before = set(multiprocessing.active_children())
    team = Team(limit=3.0)
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=report):
        team.run(case, 2, store, {})
    assert set(multiprocessing.active_children()) <= before, "a process is still running"
    assert time.monotonic() - start < 60 + 20, "the limit did not hold"  # the first is for their start


@in_processes(2)
def test_processes_are_real_and_communicate(rank: int) -> None:
    numbers = torch.tensor([1.0 + rank])
    dist.all_reduce(numbers)
    assert numbers.item() == 3.0
