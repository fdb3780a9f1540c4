"""The log of a run: JSON, one event per line; and the experiment trackers that show it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._files import create_own, open_own
from ._trackers import Tracker

Event = dict[str, Any]


class Log:
    """Appends events to `log.jsonl`. Events after the step that a run resumes from are removed first."""

    def __init__(self, folder: Path, step: int, trackers: Sequence[Tracker] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        if self.path.is_file() and not self.path.is_symlink():  # which is refused below
            _cut(self.path, step)
        descriptor = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")
        self._trackers = trackers

    def write(self, event: Event) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        numbers = {
            f"{event['event']}/{name}": value
            for name, value in event.items()
            if name not in ("event", "step") and isinstance(value, (int, float))
        }
        if numbers:
            for tracker in self._trackers:
                tracker.log(numbers, event["step"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be flushed was reported as it was written
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _cut(path: Path, step: int) -> None:
    """Keep the events up to a step. A line that a killed run did not finish is removed too."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
    new = path.with_name(f"{path.name}.unfinished")
    with os.fdopen(create_own(new), "w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
