"""examples/distributed_training.py: one process, several, several nodes; and workers that are killed in mid-epoch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from launching import SCRIPT, Launched, final_loss, nodes, same_bits, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loopback addresses beyond the first"),
]

SMALL = ("--batch", "4", "--length", "32", "--width", "32", "--depth", "4", "--show-every", "5", "--save-every", "10")
KILLED_AT, STEPS = 15, 50
LAST = f"step-{STEPS:08}.pt"


def script(*arguments: str) -> Launched:
    return Launched(SCRIPT, *SMALL, *arguments)


def test_a_run_resumes_bit_identically_alone_and_up_to_rounding_with_two_processes(tmp_path: Path) -> None:
    whole, parts, mixed = (str(tmp_path / name) for name in ("whole", "parts", "mixed"))
    quiet = ("--dropout", "0")  # which draws other numbers in other processes
    with script(*quiet, "--steps", "20", "--checkpoints", whole) as run:
        expected = final_loss(run.finish())
    with script(*quiet, "--steps", "10", "--checkpoints", parts) as run:
        run.finish()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "step-00000010.pt").write_bytes((tmp_path / "parts" / "step-00000010.pt").read_bytes())
    with script(*quiet, "--steps", "20", "--checkpoints", parts) as run:
        assert final_loss(run.finish()) == expected
        assert [start for _, _, start in run.starts()] == [10]
    assert same_bits(Path(whole, "step-00000020.pt"), Path(parts, "step-00000020.pt"))
    with torchrun(2, *SMALL, *quiet, "--steps", "20", "--checkpoints", mixed) as run:
        assert final_loss(run.finish()) == pytest.approx(expected, abs=2e-6)
        assert sorted((rank, start) for rank, _, start in run.starts()) == [(0, 10), (1, 10)]
    assert not same_bits(Path(whole, "step-00000020.pt"), Path(whole, "step-00000010.pt"))


def test_a_job_whose_worker_is_killed_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """The first process is killed, the one that writes the checkpoints."""
    undisturbed, disturbed = (
        (*SMALL, "--steps", str(STEPS), "--checkpoints", str(tmp_path / name)) for name in ("undisturbed", "disturbed")
    )
    with torchrun(2, *undisturbed) as run:
        expected = final_loss(run.finish())
        assert [start for _, _, start in run.starts()] == [0, 0]
    with torchrun(2, *disturbed) as run:
        run.wait_for_step(KILLED_AT)
        os.kill(next(process for rank, process, _ in run.starts() if rank == 0), signal.SIGKILL)
        assert final_loss(run.finish()) == expected
    check_restart(run)
    assert same_bits(tmp_path / "undisturbed" / LAST, tmp_path / "disturbed" / LAST)


def test_a_job_of_two_nodes_whose_worker_is_killed_ends_with_the_bits_of_one_node(tmp_path: Path) -> None:
    """Two processes per node, sharded with FSDP2; a process of the second node is killed."""
    undisturbed, disturbed = (
        (*SMALL, "--fsdp", "--steps", str(STEPS), "--checkpoints", str(tmp_path / name))
        for name in ("undisturbed", "disturbed")
    )
    with torchrun(4, *undisturbed) as run:
        expected = final_loss(run.finish())
    first, second = nodes(2, *disturbed)
    with first, second:
        first.wait_for_start(2)
        second.wait_for_start(2)
        leader, other = sorted((first, second), key=lambda node: min(node.starts()))
        leader.wait_for_step(KILLED_AT)
        os.kill(other.starts()[-1][1], signal.SIGKILL)
        texts = leader.finish() + other.finish()
    for node in (leader, other):
        check_restart(node)
    assert final_loss(next(t for t in (leader.text, other.text) if "Done" in t)) == expected, texts
    assert same_bits(tmp_path / "undisturbed" / LAST, tmp_path / "disturbed" / LAST)


def check_restart(run: Launched) -> None:
    """Two processes started from step 0, and two more from a checkpoint in the middle.

    On a busy machine torchrun restarts more than once: all nodes have to meet again, and one can come late.
    """
    starts = [start for _, _, start in run.starts()]
    assert starts[:2] == [0, 0]
    assert len(starts) in (4, 6, 8)
    for one, other in zip(starts[2::2], starts[3::2], strict=True):
        assert 0 < one == other < STEPS
        assert one % 10 == 0


def test_a_batch_that_does_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    with script("--batch", "3") as run, pytest.raises(AssertionError, match="cannot be shared by 2 processes"):
        run.finish()
