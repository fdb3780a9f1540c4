"""Experiment trackers behind one interface. Each is imported only where a run asks for it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ._config import ConfigError

Values = Mapping[str, float]


class Tracker(Protocol):
    """What shows a run's numbers, by name and step."""

    def log(self, values: Values, step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/`. Those after the step that a run resumes from are hidden."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases: offline, in `wandb/`, unless WANDB_MODE says otherwise. `wandb sync` uploads it."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "retrograde"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            mode=mode,
        )

    def log(self, values: Values, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio, on this machine: in TRACKIO_DIR, or its own folder. `trackio show` opens it."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project="retrograde", name=folder.name, config=dict(settings), resume="allow", embed=False)

    def log(self, values: Values, step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: Mapping[str, Callable[[Path, int, Mapping[str, Any]], Tracker]] = {"wandb": Wandb, "trackio": Trackio}


def trackers_of(name: str, folder: Path, step: int, settings: Mapping[str, Any]) -> list[Tracker]:
    """TensorBoard if it is installed, and the tracker that the configuration names.

    Args:
        name: `output.tracker` of the configuration.
        step: the step that the run resumes from.
        settings: the configuration, which the tracker shows beside the numbers.
    """
    trackers: list[Tracker] = []
    with contextlib.suppress(ImportError):  # it is an extra
        trackers.append(TensorBoard(folder, step, settings))
    if name == "none":
        return trackers
    try:
        return [*trackers, TRACKERS[name](folder, step, settings)]
    except ModuleNotFoundError as error:
        for tracker in trackers:
            tracker.close()
        raise ConfigError(
            f'output.tracker = "{name}" needs {error.name}, which is not installed: pip install {name}, or leave '
            "output.tracker out; log.jsonl has all numbers."
        ) from None
