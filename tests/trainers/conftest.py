"""Warnings of third-party code, each with its reason; our own stay errors."""

from __future__ import annotations

import pytest

NOT_OURS = (
    # lightning uses a name of torch's pytree that torch has deprecated
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
    # lightning recommends more worker processes than two cores need
    "ignore:The '.*dataloader' does not have many workers",
    # a resumed run continues in the folder of the first one
    "ignore:Checkpoint directory .* exists and is not empty",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interop") and "trainers" in item.path.parts:
            for line in NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(line))
