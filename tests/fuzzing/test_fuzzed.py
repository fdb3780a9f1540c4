"""Whatever is typed or handed over: an answer or a sentence, never a traceback. `make fuzz` draws many more."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
pytest.importorskip("safetensors", reason="the trainer needs the extra 'train'")

from typer.testing import CliRunner

from odd_values import COUNT, MODEL, command, configuration, forged
from retrograde.cli._app import app
from retrograde.cli._ending import UNFORESEEN
from retrograde.measure import timing
from retrograde.training import CheckpointError, ConfigError, TrainingError, config_of, load_model, train
from retrograde.training._checkpoints import _digest, _digest_of

FIRST = random.SystemRandom().randrange(10**9) if COUNT > 1 else 0  # of the seeds
LONGEST = 60.0  # seconds of processor time that one may take: the machine may be busy
TEXT = "one green bottle, hanging on the wall. " * 20
CONFIG = """\
data.path = "text.txt"
data.length = 8
model.width = 8
model.depth = 1
model.heads = 1
training.steps = 2
training.batch = 2
training.warmup = 1
output.save_every = 1
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(timing, "_PATIENCE", 0.0)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import nothing_like_it")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def run(words: list[str]) -> None:
    """Run a command, which must end with an answer or a sentence."""
    began = time.process_time()
    result = CliRunner().invoke(app, words)
    said = f"{words!r:.2000}\n{result.output[-3000:]}"
    assert result.exit_code in (0, 1, 2), said
    assert result.exception is None or isinstance(result.exception, SystemExit), f"{said}\n{result.exception!r}"
    assert "Traceback" not in result.output, said
    assert UNFORESEEN not in result.output, said
    assert result.output.strip(), said
    assert time.process_time() - began < LONGEST, said


@pytest.mark.parametrize("part", range(COUNT))
@pytest.mark.usefixtures("place")
def test_every_command_ends_with_an_answer_or_a_sentence(part: int) -> None:
    for seed in range(30):
        run(command(random.Random(FIRST + 1000 * part + seed)))


@pytest.mark.parametrize("part", range(COUNT))
def test_every_configuration_is_valid_or_explained(place: Path, part: int) -> None:
    for seed in range(60):
        text = configuration(random.Random(FIRST + 1000 * part + seed), CONFIG)
        (place / "odd.toml").write_text(text, encoding="utf-8")
        run(["train", "odd.toml", "--check"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    tables: dict[str, Any] = {
        "data": {"path": str(folder / "text.txt"), "length": 8},
        "model": {"width": 8, "depth": 1, "heads": 1},
        "training": {"steps": 2, "batch": 2, "warmup": 1, "device": "cpu"},
        "evaluation": {"every": 0},
    }
    train(config_of({**tables, "output": {"folder": str(folder / "run")}}))
    return folder / "run", tables


@pytest.mark.parametrize("part", range(COUNT))
def test_every_forged_checkpoint_is_loaded_or_explained(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, part: int
) -> None:
    whole, tables = trained
    config = config_of({**tables, "output": {"folder": str(tmp_path / "run")}})
    for seed in range(40):
        draw = random.Random(FIRST + 1000 * part + seed)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "run")
        forge(draw, next((tmp_path / "run" / "checkpoints").iterdir()))
        for use in (lambda: load_model(tmp_path / "run"), lambda: train(config)):
            try:
                use()
            except (CheckpointError, ConfigError, TrainingError):
                continue


def forge(draw: random.Random, path: Path) -> None:
    """Change a checkpoint's state or the bytes of a file, with digests that agree."""
    state = json.loads((path / "state.json").read_text())
    if draw.random() < 0.3:
        name = draw.choice(list(state["files"]))
        data = bytearray((path / name).read_bytes())
        for _ in range(draw.choice([1, 3])):
            data[draw.randrange(min(len(data), 600))] = draw.randrange(256)
        (path / name).write_bytes(data)
        state["files"][name] = {"bytes": len(data), "sha256": _digest(path / name)}
    else:
        state = forged(draw, state)
    if isinstance(state, dict):
        state.pop("sha256", None)
        state["sha256"] = _digest_of(state)
    (path / "state.json").write_text(json.dumps(state))
