"""FSDP2 on drop-ins, over gloo, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from processes import two_processes
from published import TIGHT
from systems import SYSTEMS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_sharded_branches_blocks_and_roots_give_the_mean_gradient(tmp_path: Path) -> None:
    for lines in two_processes("fsdp_worker.py", store=tmp_path / "store"):
        errors = {line.rpartition(", ")[0]: float(line.rpartition(", ")[2]) for line in lines}
        assert len(errors) == 3 * len(SYSTEMS) - 1
        assert max(errors.values()) <= TIGHT, errors
