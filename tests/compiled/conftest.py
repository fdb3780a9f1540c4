"""Compiled code: one cache for the session, in a temporary folder, and every test starts with nothing compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from retrograde.engine.torch_internals import VERSION

if VERSION < (2, 13):  # which one graph for a whole stack needs; compiled branches need no more than the rest
    collect_ignore_glob = ["conftest.py", "test_backend*.py", "test_compiler_internals.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
