"""A run's folder to which others can write: no link in it leads elsewhere, and no forged checkpoint is believed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="the trainer needs the extra 'train'")

import runs
from retrograde.training import CheckpointError, ConfigError, TrainingError, load_model
from retrograde.training._checkpoints import _digest, _digest_of, _safetensors

Forge = Callable[[dict[str, Any]], Any]
LAST = Path("run", "checkpoints", "step-00000012")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    runs.trained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "run", tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize("name", ["lock", "log.jsonl"])
def test_a_link_in_the_folder_is_not_followed(folder: Path, name: str) -> None:
    precious = folder / "precious.txt"
    precious.write_text("precious")
    (folder / "run" / name).unlink(missing_ok=True)
    (folder / "run" / name).symlink_to(precious)
    with pytest.raises(TrainingError, match=f"{name}: it is a link"):
        runs.trained(folder)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("link", ["symbolic", "hard"])
@pytest.mark.parametrize("name", ["lock", "log.jsonl.unfinished"])
def test_no_file_elsewhere_is_emptied_through_a_link(folder: Path, name: str, link: str) -> None:
    precious = folder / "precious.txt"
    precious.write_text("precious")
    (folder / "run" / name).unlink(missing_ok=True)
    if link == "hard":
        (folder / "run" / name).hardlink_to(precious)
    else:
        (folder / "run" / name).symlink_to(precious)
    with contextlib.suppress(TrainingError):  # which is right, too
        runs.trained(folder)
    assert precious.read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
@pytest.mark.parametrize("name", [LAST.name, f"{LAST.name}.unfinished", f"{LAST.name}.removed"])
def test_what_is_not_a_folder_where_a_checkpoint_goes_is_replaced_unread(folder: Path, name: str, kind: str) -> None:
    """A pipe that is opened waits for somebody who writes into it: the run looked hung."""
    precious, place = folder / "precious.txt", folder / LAST.parent / name
    precious.write_text("precious")
    shutil.rmtree(folder / LAST)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(precious)
    else:
        place.write_text("no checkpoint")
    runs.trained(folder)
    assert sorted(path.name for path in (folder / LAST.parent).iterdir())[-1] == LAST.name
    assert (folder / LAST / "state.json").is_file()
    assert not (folder / LAST).is_symlink()
    assert precious.read_text() == "precious"


def forged(path: Path, forge: Forge) -> None:
    """Change the state of a checkpoint, with digests that agree."""
    state = json.loads((path / "state.json").read_text())
    del state["sha256"]
    state = forge(state) or state
    if isinstance(state, dict):
        state["sha256"] = _digest_of(state)
    (path / "state.json").write_text(json.dumps(state))


def another_file(name: str) -> Forge:
    def forge(state: dict[str, Any]) -> None:
        state["files"][name] = {"bytes": 0, "sha256": "0" * 64}

    return forge


def setting(*path: str, to: Any) -> Forge:
    def forge(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to

    return forge


FORGERIES: dict[str, tuple[Forge, str]] = {
    "a device": (another_file("/dev/zero"), "and no others"),
    "a file elsewhere": (another_file("../../secret"), "and no others"),
    "no files": (setting("files", to={}), "and no others"),
    "files that are a list": (setting("files", to=["model.safetensors"]), "and no others"),
    "a negative step": (setting("step", to=-3), "no number of steps"),
    "a step of many digits": (setting("step", to=10**400), "no number of steps"),
    "a step that is text": (setting("step", to="8"), "no number of steps"),
    "no details": (setting("details", to=None), "has no details"),
    "a configuration without tables": (setting("details", "config", to={"model": 3}), "tables"),
    "a size that is text": (setting("files", "model.safetensors", to="x"), "indices must be"),
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.timeout(60)
def test_a_forged_state_is_damage_though_its_digests_agree(folder: Path, name: str) -> None:
    forge, words = FORGERIES[name]
    forged(folder / LAST, forge)
    for use in (runs.trained, lambda folder: load_model(folder / "run")):
        with pytest.raises(CheckpointError, match="is damaged") as error:
            use(folder)
        assert words in str(error.value)


@pytest.mark.timeout(60)
def test_a_deeply_nested_state_is_damage(folder: Path) -> None:
    (folder / LAST / "state.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        runs.trained(folder)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
@pytest.mark.timeout(60)
def test_a_link_in_a_checkpoint_is_not_followed(folder: Path, name: str) -> None:
    (folder / LAST / name).unlink()
    (folder / LAST / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is damaged"):
        runs.trained(folder)


def replace_tensors(path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = _safetensors().torch.load_file(path / name)
    change(tensors)
    _safetensors().torch.save_file(tensors, path / name)

    def forge(state: dict[str, Any]) -> None:
        state["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": _digest(path / name)}

    forged(path, forge)


def _first(tensors: dict[str, Any], change: Callable[[Any], Any]) -> None:
    name = next(name for name, tensor in tensors.items() if tensor.ndim)
    tensors[name] = change(tensors[name])


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "renamed": lambda tensors: tensors.update(other=tensors.pop(next(iter(tensors)))),
    "another shape": lambda tensors: _first(tensors, lambda t: torch.zeros(3)),
    "another dtype": lambda tensors: _first(tensors, lambda t: t.to(torch.int32)),
    "not finite": lambda tensors: _first(tensors, lambda t: torch.full_like(t, float("nan"))),
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_the_model_does_not_have_are_damage(folder: Path, file: str, name: str) -> None:
    replace_tensors(folder / LAST, file, CHANGES[name])
    with pytest.raises(CheckpointError, match="not what this model has"):
        runs.trained(folder)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("config", "model", "width"), 10**30),
        (("config", "model", "depth"), 2**62),
        (("config", "model", "width"), 2**40),
        (("config", "model", "memory"), ["reverse"]),
        (("vocabulary", "size"), -1),
        (("vocabulary", "size"), "many"),
        (("vocabulary", "characters"), 7),
    ],
)
@pytest.mark.timeout(60)
def test_a_forged_configuration_or_vocabulary_is_damage(folder: Path, where: tuple[str, ...], value: Any) -> None:
    forged(folder / LAST, setting("details", *where, to=value))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_model(folder / "run")
    if where[-1] != "memory":  # which may change from run to run
        with pytest.raises((CheckpointError, ConfigError)):
            runs.trained(folder)
