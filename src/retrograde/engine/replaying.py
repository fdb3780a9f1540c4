"""Whether the code that runs now is a replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

REPLAYS = threading.local()
"""`REPLAYS.depth` counts the replays that are under way on this thread, one inside another."""


def is_replaying() -> bool:
    """Whether this code runs a second time, to recompute activations for the backward pass.

    For branches and hooks with effects of their own (counters, logs): skip them in a replay.
    """
    return getattr(REPLAYS, "depth", 0) > 0


@contextmanager
def replaying() -> Iterator[None]:
    """A context that counts as a replay."""
    REPLAYS.depth = getattr(REPLAYS, "depth", 0) + 1
    try:
        yield
    finally:
        REPLAYS.depth -= 1
