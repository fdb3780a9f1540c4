"""Plans for several ranks, held against real processes: the peak of each is the predicted one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from paper_predictions import OF_A_RANK, peaks_of_ranks


@pytest.mark.parametrize("shard", ["ddp", "fsdp2"])
def test_the_predicted_peak_of_a_rank_is_that_of_real_processes(shard: str) -> None:
    for mode, (predicted, real) in peaks_of_ranks("MLPs", 2, shard).items():
        assert real == pytest.approx([predicted] * 2, rel=OF_A_RANK), mode
