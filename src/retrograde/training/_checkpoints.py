"""Checkpoints: one folder each, with tensors in safetensors and the rest in JSON. Nothing in them is ever run.

NOTE [Why a checkpoint is complete or absent]
 1. It is written under another name (`.unfinished`), each file is flushed to the disk, and the folder is then renamed,
    which file systems do atomically. A run that is killed before that leaves an unfinished one, which the next run
    removes.
 2. `state.json` has the size and the SHA-256 of each file, so that a truncated or altered one is noticed.
 3. Old ones are removed after the new one was written. They are renamed first, so that a half-removed one does not
    look like a checkpoint.
 4. A damaged checkpoint is never silently removed, replaced or skipped: the run ends with an error that names the
    last good one.
 5. A run that resumes from an earlier one (`--from`) leaves the later ones behind. They do not count among those to
    keep, and are renamed (`.left`) before the first new one is finished, so that the next run resumes from that.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ._files import discard, open_own, read_own

FORMAT = 1
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_LARGEST_STATE = 1 << 26  # bytes of state.json, whose largest part is a vocabulary of characters


_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says why, what is still good, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue as if it had not stopped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    details: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one run, the last `keep` of them. See NOTE [Why a checkpoint is complete or absent]."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def finished(self) -> list[Path]:
        """The finished checkpoints, the oldest first."""
        paths = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted((p for p in paths if p.is_dir() and p.name.removeprefix("step-").isdecimal()), key=_step_of)

    def tidy(self) -> None:
        """Create the folder, and remove what a killed run left unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in [*self.folder.glob("step-*.unfinished"), *self.folder.glob("step-*.removed")]:
            discard(left)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove those that are too old."""
        path = self.path(checkpoint.step)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            discard(unfinished)
            _write(unfinished, checkpoint)
            for later in [other for other in self.finished() if _step_of(other) > checkpoint.step]:
                later.rename(_unused(later.with_name(f"{later.name}.left")))
            if path.exists():
                self._remove(path)
            unfinished.rename(path)
            _flush(self.folder)
        except (OSError, _safetensors().SafetensorError) as error:
            discard(unfinished)
            raise CheckpointError(
                f"The checkpoint {path} could not be written: {getattr(error, 'strerror', None) or error}. "
                f"{self._last_good(path)} Free some space, and run the same command again to resume from there."
            ) from None
        for old in self.finished()[: -self.keep]:
            self._remove(old)
        return path

    def load(self, path: Path) -> Checkpoint:
        """Read a checkpoint and check that it is complete."""
        if not any((path / name).exists() for name in (_STATE, _MODEL, _OPTIMIZER)):
            raise CheckpointError(
                f"{path} is not a checkpoint: it has no {_STATE}. {self._last_good(path)} Nothing was changed."
            )
        try:
            state = _checked_state(path)
            load = _safetensors().torch.load_file
            return Checkpoint(state["step"], load(path / _MODEL), load(path / _OPTIMIZER), state["details"])
        except (*_DAMAGE, _safetensors().SafetensorError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = f"{error.strerror}: {error.filename}"
            raise CheckpointError(
                f"The checkpoint {path} is damaged: {reason}. {self._last_good(path)} Nothing was changed. "
                "Name another one to resume from with --from; a damaged one is replaced when training reaches its step."
            ) from None

    def _last_good(self, other: Path) -> str:
        for path in reversed(self.finished()):
            if path != other:
                with contextlib.suppress(*_DAMAGE):
                    _checked_state(path)
                    return f"The last good one is {path}."
        return "There is no other good one."

    def _remove(self, path: Path) -> None:
        removed = path.with_name(f"{path.name}.removed")
        discard(removed)
        path.rename(removed)
        discard(removed)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _unused(path: Path) -> Path:
    """The path, with a number appended if it exists."""
    names = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in itertools.count(1))
    return next(name for name in names if not name.exists())


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir()
    save = _safetensors().torch.save_file
    files = {}
    for name, tensors in ((_MODEL, checkpoint.model), (_OPTIMIZER, checkpoint.optimizer)):
        save({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        _flush(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
    state = {"format": FORMAT, "step": checkpoint.step, "files": files, "details": checkpoint.details}
    state["sha256"] = _digest_of(state)
    (folder / _STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    _flush(folder / _STATE)
    _flush(folder)


def _checked_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, all of whose files are unaltered."""
    content = read_own(path / _STATE, _LARGEST_STATE)
    try:
        state: Any = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{_STATE} is not JSON") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{_STATE} is not of format {FORMAT}, which this version reads")
    if state.pop("sha256", None) != _digest_of(state):
        raise ValueError(f"{_STATE} was altered")
    _check_form(state)
    for name in (_MODEL, _OPTIMIZER):  # whatever else it may name is not opened
        wanted = state["files"][name]
        size = (path / name).lstat().st_size
        if size != wanted["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes instead of {wanted['bytes']:,}")
        if _digest(path / name) != wanted["sha256"]:
            raise ValueError(f"{name} was altered: its size is right, but its SHA-256 is not")
    return dict(state)


def _check_form(state: dict[str, Any]) -> None:
    """Raise for a state that has the right hash, but that no run wrote."""
    if not isinstance(state.get("files"), dict) or set(state["files"]) != {_MODEL, _OPTIMIZER}:
        raise ValueError(f"{_STATE} does not name the files {_MODEL} and {_OPTIMIZER}, and no others")
    if type(state.get("step")) is not int or not 0 < state["step"] < 2**63:
        raise ValueError(f"{_STATE} has no number of steps")
    details = state.get("details")
    kinds = {"config": dict, "data": str, "vocabulary": dict}
    if not isinstance(details, dict) or not all(isinstance(details.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{_STATE} has no details of the configuration, the data and the vocabulary")
    if not all(isinstance(table, dict) for table in details["config"].values()):
        raise ValueError(f"{_STATE} has a configuration whose tables are none")


def check_tensors(checkpoint: Checkpoint, path: Path, model: Mapping[str, Tensor]) -> None:
    """Raise if the tensors of a checkpoint are not those that the model has, by name, shape and dtype."""
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in model.items()}
    has = {name: (tuple(t.shape), t.dtype) for name, t in checkpoint.model.items()}
    shapes = {f"model.{name}": shape for name, (shape, _) in wanted.items()}
    odd = sorted(name for name in {**wanted, **has} if wanted.get(name) != has.get(name))
    odd += sorted(key for key, t in checkpoint.optimizer.items() if not _is_state(key, t, shapes))
    tensors = {**checkpoint.model, **checkpoint.optimizer}
    odd += sorted(key for key, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all()))
    if odd:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {odd[0]} and {len(odd) - 1} more of its tensors are not what this "
            "model has, in name, shape, dtype or finite values. Nothing was changed. Name another one to resume from "
            "with --from."
        )


def _is_state(key: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor can be part of the optimiser's state for a parameter of the model."""
    name, _, part = key.rpartition("/")
    shape = tuple(tensor.shape)
    return name in shapes and shape == (() if part == "step" else shapes[name]) and tensor.is_floating_point()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _digest_of(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder for one job. The lock ends with the process, however it ends."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_own(folder / "lock", os.O_RDWR | os.O_CREAT), "w") as file:  # which it does not empty
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"Another process trains in {folder}. Wait for it, or set another output.folder."
            ) from None
        yield


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise CheckpointError("Checkpoints need safetensors: pip install 'retrograde[train]'.") from None
    return safetensors
