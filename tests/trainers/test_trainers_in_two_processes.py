"""The Hugging Face Trainer, which trains through Accelerate, in two real processes: DDP around the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.interop, pytest.mark.slow]

HERE = Path(__file__).resolve().parent


def test_two_processes_train_and_resume_bit_identically_to_stored_activations(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / "two_processes.py"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    agreed = sorted(path.stem for path in tmp_path.glob("*.agrees"))
    assert agreed == ["converted-0", "converted-1", "reversible-0", "reversible-1"]
