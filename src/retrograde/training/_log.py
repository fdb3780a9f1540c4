"""The log of a run: JSON, one event per line, and TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Log:
    """Appends events to `log.jsonl`. Events after the step that a run resumes from are removed first."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        if self.path.is_file():
            _cut(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", step)

    def write(self, event: Event) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        if self._board is not None:
            kind = event["event"]
            for name, value in event.items():
                if name not in ("event", "step") and isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, event["step"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be flushed was reported as it was written
            self._file.close()
        if self._board is not None:
            self._board.close()


def _cut(path: Path, step: int) -> None:
    """Keep the events up to a step. A line that a killed run did not finish is removed too."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
    new = path.with_name(f"{path.name}.unfinished")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _board(folder: Path, step: int) -> Any:
    try:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    except ImportError:  # it is an extra
        return None
    return tensorboard.SummaryWriter(str(folder), purge_step=step + 1)
