"""The site, built once for all tests of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: it hides warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=_offline())
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def _offline() -> dict[str, str]:
    """An environment in which every download fails."""
    nowhere = "http://127.0.0.1:9"
    return os.environ | {"http_proxy": nowhere, "https_proxy": nowhere, "NO_MKDOCS_2_WARNING": "1"}
