"""A run that is killed resumes from its last checkpoint, and ends with the bits of an uninterrupted one."""

from __future__ import annotations

import json
import sys
import time
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


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    """Killed several times, each time a little later after it started to write its log."""
    log, reached = tmp_path / "run" / "log.jsonl", []
    for delay in (0.0, 0.05, 0.1, 0.2, 0.3):
        child = runs.start(tmp_path, **LONG)
        before = log.read_bytes() if log.exists() else b""
        runs.wait_for(lambda before=before: log.exists() and log.read_bytes() not in (before, b""), child)
        time.sleep(delay)
        if not runs.kill(child):
            break  # it has finished: there is nothing left to kill
        lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
        reached.append(max((json.loads(line)["step"] for line in lines), default=0))
        if reached[-1] == LONG["training_steps"]:
            break  # the next run would have nothing to write
    assert reached[0] < 60, "the first kill is in mid-run"
    assert runs.finished(runs.start(tmp_path, **LONG)) == 0
    check_same(tmp_path, undisturbed)


def test_a_run_killed_while_it_writes_a_checkpoint_loses_only_that_one(undisturbed: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    child = runs.start(tmp_path, **LONG)
    [unfinished, *_] = runs.wait_for(lambda: list(checkpoints.glob("step-0000001*.unfinished")), child)
    assert runs.kill(child)
    good = [p for p in checkpoints.iterdir() if p.suffix == ""]
    assert good, "the ones before it exist"
    assert runs.finished(runs.start(tmp_path, **LONG)) == 0
    assert not list(checkpoints.glob("*.unfinished"))
    check_same(tmp_path, undisturbed)
    assert unfinished.stem in {f"step-{n:08}" for n in (12, 15, 18)}
