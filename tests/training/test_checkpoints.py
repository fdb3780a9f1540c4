"""Checkpoints: damage and failed writes are reported, and the good files are left unchanged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="the trainer needs the extra 'train'")

import runs
from retrograde.training import CheckpointError, ConfigError, Options, load_model
from retrograde.training._checkpoints import locked

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 8 of 12 steps."""
    folder = tmp_path_factory.mktemp("whole")
    steps: list[int] = []
    options = Options(tell=lambda event: steps.append(event["step"]), stop=lambda: max(steps, default=0) >= 7)
    assert runs.trained(folder, options).step == 8
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "run", tmp_path / "run")
    return tmp_path


def last(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / "step-00000008"


def truncate(name: str) -> Damage:
    def damage(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: len(data) * 2 // 3])

    return damage


def flip(name: str) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[-20] ^= 4
        (path / name).write_bytes(data)

    return damage


def edit_step(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 8', '"step": 9'))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a truncated model": (truncate("model.safetensors"), "model.safetensors has "),
    "a truncated optimiser": (truncate("optimizer.safetensors"), "optimizer.safetensors has "),
    "a flipped bit": (flip("model.safetensors"), "model.safetensors was altered"),
    "a truncated state": (truncate("state.json"), "state.json is not JSON"),
    "an edited state": (edit_step, "state.json was altered"),
    "an empty state": (lambda path: (path / "state.json").write_text(""), "state.json is not JSON"),
    "another kind of JSON": (lambda path: (path / "state.json").write_text("[]"), "state.json is not of format 1"),
    "a missing model": (lambda path: (path / "model.safetensors").unlink(), "No such file or directory"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_that_names_a_good_one_and_changes_nothing(folder: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(last(folder))
    before = runs.contents(folder / "run")
    with pytest.raises(CheckpointError) as caught:
        runs.trained(folder)
    assert "step-00000008 is damaged" in str(caught.value)
    assert words in str(caught.value)
    assert f"The last good one is {folder / 'run' / 'checkpoints' / 'step-00000004'}." in str(caught.value)
    assert runs.contents(folder / "run") == before


def test_resuming_from_an_earlier_checkpoint_ends_with_the_same_bits_and_replaces_the_damaged_one(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    runs.trained(undisturbed)
    flip("model.safetensors")(last(folder))
    good = folder / "run" / "checkpoints" / "step-00000004"
    result = runs.trained(folder, Options(start=good))
    assert (result.began, result.step) == (4, 12)
    for step in (8, 12):
        name = Path("run", "checkpoints", f"step-{step:08}")
        assert runs.tensors(folder / name) == runs.tensors(undisturbed / name)
    assert runs.losses(folder) == runs.losses(undisturbed)


class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_code_in_a_checkpoint_is_never_run(folder: Path, kind: str) -> None:
    """With sizes and digests that agree, so that only the format prevents it."""
    model, trap = last(folder) / "model.safetensors", folder / "trap"
    if kind == "pickle":
        model.write_bytes(pickle.dumps(Trap(trap)))
    else:
        torch.save({"x": Trap(trap)}, model)
    state = json.loads((last(folder) / "state.json").read_text())
    data = model.read_bytes()
    state["files"]["model.safetensors"] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    del state["sha256"]
    state["sha256"] = sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (last(folder) / "state.json").write_text(json.dumps(state))
    for use in (lambda: runs.trained(folder), lambda: load_model(folder / "run")):
        with pytest.raises(CheckpointError, match="is damaged"):
            use()
    assert not trap.exists()
    pickle.loads(pickle.dumps(Trap(trap)))
    assert trap.exists(), "the trap works when it is unpickled"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are set with setrlimit")
def test_a_checkpoint_that_cannot_be_written_leaves_the_good_ones_and_the_run_can_resume(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No file may grow past a limit (RLIMIT_FSIZE), which the optimiser's does: the write fails as on a full disk."""
    sizes = {name: len(data) for name, data in runs.tensors(last(folder)).items()}
    limit = (sizes["model.safetensors"] + sizes["optimizer.safetensors"]) // 2
    before = runs.contents(folder / "run" / "checkpoints")
    assert runs.finished(runs.start(folder, largest_file=limit)) == 1
    error = (folder / "error.txt").read_text()
    assert error.startswith("CheckpointError: The checkpoint")
    assert "step-00000012 could not be written" in error
    assert "File too large" in error
    assert f"The last good one is {last(folder)}." in error
    assert runs.contents(folder / "run" / "checkpoints") == before
    runs.trained(folder)
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    runs.trained(undisturbed)
    assert runs.losses(folder) == runs.losses(undisturbed)


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limit on the size of files")
def test_a_log_that_cannot_be_written_is_explained(folder: Path) -> None:
    """A file may not be larger than so much, and the log that is kept is."""
    log = folder / "run" / "log.jsonl"
    log.write_text((json.dumps({"event": "step", "step": 1}) + "\n") * 2000)
    assert runs.finished(runs.start(folder, largest_file=20_000)) == 1
    assert "File too large. Finished checkpoints are unchanged" in (folder / "error.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "words", "acceptable"),
    [
        ({"training_learning_rate": 0.5}, "training.learning_rate: 0.001 → 0.5", True),
        ({"training_seed": 3, "training_batch": 8}, "training.batch: 4 → 8", True),
        ({"model_width": 32}, "model.width: 16 → 32", False),
        ({"data_tokens": "bytes"}, "data.tokens: 'characters' → 'bytes'", False),
    ],
)
def test_a_changed_configuration_is_an_error_that_lists_the_changes(
    folder: Path, changes: dict[str, object], words: str, acceptable: bool
) -> None:
    before = runs.contents(folder / "run")
    with pytest.raises(ConfigError) as caught:
        runs.trained(folder, **changes)
    assert words in str(caught.value)
    assert ("--accept-changes" in str(caught.value)) == acceptable
    assert runs.contents(folder / "run") == before
    if acceptable:
        assert runs.trained(folder, Options(accept_changes=True), **changes).began == 8
    else:
        with pytest.raises(ConfigError):
            runs.trained(folder, Options(accept_changes=True), **changes)


def test_another_text_in_the_same_file_is_a_change(folder: Path) -> None:
    (folder / "text.txt").write_text(runs.TEXT[::-1])
    with pytest.raises(ConfigError, match="the text or the tokens differ"):
        runs.trained(folder)


def test_settings_that_do_not_change_the_computation_may_change(folder: Path) -> None:
    assert runs.trained(folder, model_memory="store", output_keep=1, evaluation_every=0).began == 8
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000012"]


def test_two_runs_cannot_share_a_folder(folder: Path) -> None:
    with locked(folder / "run"), pytest.raises(CheckpointError, match="Another process trains in"):
        runs.trained(folder)


def test_a_finished_run_is_left_unchanged(folder: Path) -> None:
    runs.trained(folder)
    before = runs.contents(folder / "run")
    result = runs.trained(folder)
    assert (result.began, result.step) == (12, 12)
    assert runs.contents(folder / "run") == before


def test_a_model_is_loaded_with_its_vocabulary_and_generates(folder: Path) -> None:
    model, vocabulary = load_model(folder / "run")
    prompt = vocabulary.encode("green ")[None].long()
    assert vocabulary.decode(model.generate(prompt, 5)[0]).startswith("green ")
    same, _ = load_model(last(folder))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    with pytest.raises(ValueError, match="has no"):
        vocabulary.encode("ß")
