"""Plans for several ranks, held against real processes: the peak of each is the predicted one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.paper_ranks import peaks_of_ranks


@pytest.mark.parametrize("shard", ["ddp", "fsdp2"])
@pytest.mark.parametrize("model", ["MLPs", "MLPs, few tokens"])
def test_the_predicted_peak_of_a_rank_is_that_of_real_processes(model: str, shard: str) -> None:
    """The least of several steps: gloo frees its copies on another thread, sooner or later."""
    for mode, (predicted, real) in peaks_of_ranks(model, 2, shard).items():
        assert min(real) == pytest.approx(predicted, rel=0.01), mode
