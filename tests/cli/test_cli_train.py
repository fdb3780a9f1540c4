"""`retrograde train` at the terminal: what it prints, its exit status, and a message for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
pytest.importorskip("safetensors", reason="the trainer needs the extra 'train'")

from typer.testing import CliRunner

from retrograde.cli._app import app

CONFIG = """
[data]
path = "text.txt"
length = 16
[model]
width = 16
depth = 2
heads = 2
[training]
steps = 6
batch = 4
warmup = 2
device = "cpu"
[evaluation]
every = 3
batches = 1
[output]
save_every = 3
log_every = 1
"""
Run = Callable[..., Any]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield lambda *args: CliRunner().invoke(app, ["train", *args])
    torch.set_num_threads(threads)


def test_it_trains_and_prints_the_loss_and_the_path_of_the_checkpoint(train: Run, tmp_path: Path) -> None:
    result = train("config.toml")
    assert result.exit_code == 0, result.stderr
    assert "Finished at step 6: run/checkpoints/step-00000006" in result.stdout
    for words in ("step 6/6 · loss", "tokens/s · peak", "s left", "step 3: loss on unseen text"):
        assert words in result.stderr
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints" / "step-00000006").iterdir()) == [
        "model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip
    second = train("config.toml")
    assert second.exit_code == 0
    assert "Already finished" in second.stdout


def test_json_is_one_event_per_line_and_equals_the_log(train: Run, tmp_path: Path) -> None:
    result = train("config.toml", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in events if e["event"] == "evaluation"] == [3, 6]
    assert (tmp_path / "run" / "log.jsonl").read_text() == result.stdout
    rates = [e["learning_rate"] for e in events if e["event"] == "step"]
    assert rates[0] == pytest.approx(5e-4)
    assert rates[1] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-4)


def test_the_example_is_a_configuration_that_trains(train: Run, tmp_path: Path) -> None:
    (tmp_path / "example.toml").write_text(train("--example").stdout)
    result = train("example.toml", "--check", "--set", "data.length=16")
    assert result.exit_code == 0, result.stderr
    assert "The configuration is valid: 1,710 tokens to train on, 90 to evaluate on, 28 different ones" in result.stdout
    assert not (tmp_path / "run").exists()


GRID = ["--set", "model.exact=true", "--set", "model.grid_bits=22"]
MISTAKES: list[tuple[list[str], int, str]] = [
    ([], 2, "Name a configuration: retrograde train config.toml"),
    (["none.toml"], 2, "none.toml cannot be read: No such file"),
    (["config.toml", "--set", "training.steps"], 2, "write table.key=value"),
    (["config.toml", "--set", "training.steps=many"], 2, "training.steps = 'many' must be a whole number"),
    (["config.toml", "--set", "data.path=none.txt"], 2, "none.txt cannot be read"),
    (["config.toml", "--set", "training.device=abacus"], 2, 'training.device = "abacus" cannot be used here'),
    (["config.toml", "--from", "nowhere"], 1, "nowhere is not a checkpoint"),
    (["config.toml", "--set", "training.learning_rate=1e30"], 1, "A smaller training.learning_rate"),
    (["config.toml", *GRID, "--set", "training.learning_rate=9"], 1, "In the configuration, write model.grid_bits ="),
    (["config.toml", "--set", "output.folder=text.txt/run"], 1, "text.txt/run"),
    (["config.toml", "--colour"], 2, "--colour"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_explained(train: Run, arguments: list[str], status: int, words: str) -> None:
    result = train(*arguments)
    assert result.exit_code == status, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_is_printed_by_the_main_process_only(train: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = train("config.toml", "--set", "training.steps=many")
    assert result.exit_code == 2
    assert not result.output


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "120"})
    for words in ("shakespeare.txt", "retrograde train --example", "torchrun --nproc-per-node 2", "Exit status"):
        assert words in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_saves_and_the_same_command_resumes(train: Run, tmp_path: Path) -> None:
    options = ["--set", "training.steps=100000", "--set", "output.save_every=100000", "--set", "training.threads=1"]
    command = [sys.executable, "-m", "retrograde", "train", "config.toml", "--json", *options]
    source = str(Path(__file__).resolve().parents[2] / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "start"
            assert json.loads(process.stdout.readline())["step"] == 1
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    last = json.loads(printed.splitlines()[-1])
    assert last["event"] == "checkpoint"
    result = train(
        "config.toml", *options[:2], "--set", f"training.steps={last['step'] + 1}", "--accept-changes", "--json"
    )
    start, step, *_ = map(json.loads, result.stdout.splitlines())
    assert (start["event"], start["step"]) == ("start", last["step"])
    assert (step["event"], step["step"]) == ("step", last["step"] + 1)


def test_a_check_prints_json_where_json_is_asked_for(train: Run, tmp_path: Path) -> None:
    result = train("config.toml", "--check", "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["event"] == "check"
    assert printed["config"]["model"]["depth"] == 2
    assert train("config.toml", "--check").stdout.count(f"{printed['weights']:,} weights") == 1
    assert not (tmp_path / "run").exists()
