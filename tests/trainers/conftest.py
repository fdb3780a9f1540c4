"""Warnings of third-party code. Each is named with its reason; ours stay errors."""

from __future__ import annotations

import pytest

NOT_OURS = (
    # lightning looks at torch's pytree in a way that torch has renamed
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
    # lightning advises more worker processes than two cores have use for
    "ignore:The '.*dataloader' does not have many workers",
    # a run that is resumed goes on in the folder of the first one
    "ignore:Checkpoint directory .* exists and is not empty",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interop") and "trainers" in item.path.parts:
            for line in NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(line))
