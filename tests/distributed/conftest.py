"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from team import Team

if not torch.distributed.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    team = Team()
    yield team
    team.stop()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files through which process groups find each other."""
    return tmp_path_factory.mktemp("stores")
