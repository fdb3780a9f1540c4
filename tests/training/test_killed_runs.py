"""A run that is killed resumes from its last checkpoint, and ends with the bits of an uninterrupted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="the trainer needs the extra 'train'")

import runs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked and killed by signals")
LONG = {"training_steps": 60, "output_save_every": 3, "output_keep": 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    runs.trained(folder, **LONG)
    return folder


def check_same(folder: Path, wanted: Path) -> None:
    last = Path("run", "checkpoints", "step-00000060")
    assert runs.tensors(folder / last) == runs.tensors(wanted / last)
    assert len(runs.tensors(folder / last)) == 2
    assert runs.losses(folder) == runs.losses(wanted)
    assert [p.name for p in sorted((folder / "run" / "checkpoints").iterdir())] == [
        "step-00000054", "step-00000057", "step-00000060",
    ]  # fmt: skip


def reached(log: Path) -> int:
    """The last step that a log names. A line that is still being written counts as none."""
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    """Killed several times, each time further on: by what its log says, because a fast machine is soon done."""
    log, killed = tmp_path / "run" / "log.jsonl", []
    for step in (1, 8, 17, 29, 44):
        child = runs.start(tmp_path, **LONG)
        runs.wait_for(lambda step=step: reached(log) >= step, child)
        killed.append(runs.kill(child))
    assert killed[0], "the first kill is in mid-run"
    assert runs.finished(runs.start(tmp_path, **LONG)) == 0
    check_same(tmp_path, undisturbed)


def test_a_run_killed_while_it_writes_a_checkpoint_loses_only_that_one(undisturbed: Path, tmp_path: Path) -> None:
    for attempt in range(10):  # the files are there for a moment only, which a look at the folder can miss
        folder = tmp_path / str(attempt)
        checkpoints = folder / "run" / "checkpoints"
        child = runs.start(folder, **LONG)
        runs.wait_for(lambda files=checkpoints: list(files.glob("step-0000001*.unfinished")), child)
        if runs.kill(child) and (unfinished := list(checkpoints.glob("*.unfinished"))):
            break
    else:
        pytest.fail("ten runs, and not one was killed while it wrote a checkpoint")
    assert [p for p in checkpoints.iterdir() if p.suffix == ""], "the ones before it exist"
    assert unfinished[0].stem in {f"step-{n:08}" for n in (12, 15, 18)}
    assert runs.finished(runs.start(folder, **LONG)) == 0
    assert not list(checkpoints.glob("*.unfinished"))
    check_same(folder, undisturbed)
