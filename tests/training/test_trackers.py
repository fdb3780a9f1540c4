"""Experiment trackers: each gets the numbers of the log, and is imported only where a run names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runs
from retrograde.training import ConfigError
from retrograde.training._log import Log


class Recorder:
    """A tracker of three lines."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []
        self.closed = False

    def log(self, values: Any, step: int) -> None:
        self.seen.append((dict(values), step))

    def close(self) -> None:
        self.closed = True


def test_a_tracker_gets_the_numbers_of_every_event_and_is_closed(tmp_path: Path) -> None:
    recorder = Recorder()
    log = Log(tmp_path, 0, [recorder])
    log.write({"event": "step", "step": 3, "loss": 1.5, "device": "cpu"})
    log.write({"event": "checkpoint", "step": 4, "path": "x"})
    log.close()
    assert recorder.seen == [({"step/loss": 1.5}, 3)]
    assert recorder.closed


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_is_shown_by_the_tracker_it_names_without_a_connection(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    monkeypatch.delenv("WANDB_MODE", raising=False)
    pytest.importorskip(name)
    runs.trained(tmp_path, training_steps=3, output_tracker=name)
    written = [path for path in (tmp_path / "run" / "wandb", tmp_path / "trackio") if path.exists()]
    assert any(file.stat().st_size for folder in written for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=f'output.tracker = "{name}" needs {name}, which is not installed: pip install'
    ):
        runs.trained(tmp_path, output_tracker=name)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_no_tracker_is_imported_unless_a_run_names_it() -> None:
    code = "import sys, retrograde.training; print(*sys.modules.keys() & {'wandb', 'trackio'})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not run.stdout.strip()
