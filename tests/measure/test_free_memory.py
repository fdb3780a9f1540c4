"""Free bytes: what a machine, its container and its accelerators still have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from retrograde.measure import free_memory

MEMINFO = "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 100 kB\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": MEMINFO}, 102_400),
        ({"proc/meminfo": "MemTotal: 900 kB\n"}, sys.maxsize),
        ({}, sys.maxsize),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "9"}, 102_400),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "60", "sys/fs/cgroup/memory.current": "9"}, 51),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "500",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "100",
            },
            400,
        ),
    ],
    ids=[
        "machine",
        "an old kernel",
        "not Linux",
        "container without a limit",
        "container",
        "first generation",
    ],
)
def test_free_bytes_are_what_machine_and_container_leave(tmp_path: Path, files: dict[str, str], free: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory.free_bytes(torch.device("cpu"), tmp_path) == free


def test_this_machine_has_room_for_a_little_and_not_for_everything() -> None:
    assert free_memory.has_room(nn.Linear(2, 2), 1000)
    assert not free_memory.has_room(nn.Linear(2, 2), 2**60)
    assert free_memory.has_room(nn.Linear(2, 2, device="meta"), 1000)
