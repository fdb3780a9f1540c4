"""The hot path can be read: a steady step changes few files, and its own file is short."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import retrograde

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from file_changes import changes_per_step

MOST_CHANGES, MOST_LINES = 8, 300


@pytest.mark.calling_thread  # a profile sees the calls of its own thread
@pytest.mark.parametrize("exact", [False, True], ids=["ordinary", "exact"])
def test_a_steady_step_changes_between_files_at_most_eight_times_in_each_direction(exact: bool) -> None:
    forward, backward = changes_per_step("reverse", exact)
    assert 0 < forward <= MOST_CHANGES
    assert 0 < backward <= MOST_CHANGES


def test_the_file_of_the_hot_path_has_at_most_three_hundred_lines() -> None:
    path = Path(retrograde.__file__).parent / "engine" / "step_run.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
