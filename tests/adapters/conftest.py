"""The marker of tests that need third-party packages, and the packages, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from published import Twins

# Warnings of third-party code. Each is named with its reason; ours stay errors.
NOT_OURS = (
    # routing-transformer registers its k-means update with torch's old kind of backward hook
    "ignore:Using a non-full backward hook:FutureWarning",
    "ignore:Using non-full backward hooks:FutureWarning",
    # docstrings of lie-transformer-pytorch, compiled by a test that reads its files
    "ignore:.*invalid escape sequence",
    # vector-quantize-pytorch and mixture-of-experts decorate with a name that torch has renamed
    "ignore:`torch.cuda.amp:FutureWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interop: needs the published packages (the extra 'interop')")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interop"):
            for line in NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(scope="session")
def twins() -> Callable[[str], Twins]:
    """A package as published and on retrograde; skips where it is not installed."""
    return cache(Twins)
