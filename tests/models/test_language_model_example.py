"""The example of the language model runs with tiny arguments, and prints what it claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "language_model.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_language_model_trains_generates_and_has_flat_memory() -> None:
    done = run("--small", "--steps", "4", "--depth", "3", "--width", "32", "--memory", "reverse", "--exact")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert re.search(r"step +4/4  loss \d+\.\d+", done.stdout)
    assert re.search(r"Unseen text: \d\.\d+ nats", done.stdout)
    assert re.search(r"Generated, \d+ characters per second:\n  \| The .", done.stdout)
    assert "store: grows" in done.stdout
    assert "reverse: flat" in done.stdout


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    done = run("--width", "20")
    assert done.returncode == 2
    assert "argument --width: 20 is not a multiple of 8" in done.stderr
    assert "Traceback" not in done.stderr
