"""What every test starts from: one thread, the same seeds, and torch's global settings left as they were found."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Before torch loads: oneDNN's bfloat16 kernels die with SIGILL on some machines. See the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import pytest
import torch

from backward_threads import backward_in_threads

torch.set_num_threads(1)

collect_ignore_glob = ["conftest.py", "*/conftest.py"]  # no doctests in there, and modules of one name are refused


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)  # the global generator, which branches under test draw from
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backward-threads", action="store_true", help="run every backward pass in a fresh thread")


@pytest.fixture(autouse=True)
def _backward_in_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the option, or for tests marked `backward_thread`: each backward pass in a fresh thread."""
    node = request.node
    if node.get_closest_marker("calling_thread") or not (
        request.config.getoption("--backward-threads") or node.get_closest_marker("backward_thread")
    ):
        yield
        return
    with backward_in_threads():
        yield


def _settings() -> dict[str, object]:
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def _global_settings_are_left_as_found() -> Iterator[None]:
    before = _settings()
    yield
    after = _settings()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"The test left torch's global settings changed (before, after): {changed}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
        pytest.skip("no accelerator on this machine")
