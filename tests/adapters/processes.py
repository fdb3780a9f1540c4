"""Two processes of a test that needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def two_processes(script: str, *before: str, store: Path) -> list[list[str]]:
    """Start a script of this folder twice, as `script *before rank store`; the lines that each one wrote."""
    search = [str(HERE), str(HERE.parents[1] / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in search if path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *before, str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs
    return [out.strip().splitlines() for out, _ in outputs]
