"""`retrograde profile`: a table, a picture and a page; and mistakes said in a sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
pytest.importorskip("matplotlib", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

from retrograde.cli._app import app

MODELS = """
import torch, retrograde as rg
from torch import nn

print("loading")

def stack(depth=6):
    return rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)])

def deep(): return stack(), torch.randn(64, 8)
def staged():
    return rg.ReversibleSequence([*stack(2), rg.transition(nn.Tanh(), nn.Tanh()), *stack(2)]), torch.randn(64, 8)
def plain(): return nn.Linear(8, 8), torch.randn(4, 8)
def wrong_shape(): return stack(), torch.randn(4, 9)
def raises(): raise RuntimeError("no weights")
"""
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "profiled_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "profiled_models", raising=False)
    return lambda *args: CliRunner().invoke(app, ["profile", *args])


def test_the_command_prints_a_table_and_writes_picture_and_page(run: Run, tmp_path: Path) -> None:
    result = run("profiled_models.py:deep", "--output", "a/b")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("The peak is ") == 3
    assert (tmp_path / "a" / "b" / "memory.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a" / "b" / "memory.html").read_text()
    assert "<svg" in page
    assert page.count("<h2>") == 3
    assert "src=" not in page, "one file, that needs no other"


def test_json_alone_is_on_stdout(run: Run) -> None:
    result = run("profiled_models.py:deep", "--json", "--mode", "reverse")
    figures = json.loads(result.stdout)
    assert [mode["memory"] for mode in figures["modes"]] == ["reverse"]
    assert len(figures["modes"][0]["blocks"]) == 6
    assert "loading" in result.stderr


def test_a_model_with_a_stage_transition_is_profiled_in_selective_mode(run: Run) -> None:
    result = run("profiled_models.py:staged", "--mode", "selective", "--mode", "offload")
    assert result.exit_code == 0, result.stderr
    assert 'memory="selective": peak' in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["profiled_models.py:deep", "--mode", "revers"], 2, "--mode='revers' is not known; choose one of 'reverse'"),
        (["profiled_models.py:deep", "--output", "profiled_models.py/x"], 2, "--output profiled_models.py/x"),
        (["nowhere.py:make"], 2, "There is no file nowhere.py."),
        (["profiled_models.py:raises"], 2, "raised RuntimeError: no weights"),
        (["profiled_models.py:plain"], 1, "Cannot profile: Linear contains no retrograde.ReversibleSequence"),
        (["profiled_models.py:wrong_shape"], 1, "Cannot profile: The model raised RuntimeError"),
        (["profiled_models.py:wrong_shape"], 1, "(raised by the branch Linear in block 0 of a ReversibleSequence"),
    ],
)
def test_a_mistake_is_said_in_a_sentence(run: Run, arguments: list[str], status: int, words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_help_teaches_by_example() -> None:
    result = CliRunner().invoke(app, ["profile", "--help"], env={"COLUMNS": "120"})
    for words in ("def make():", "retrograde profile my_model.py:make", "memory.html", "Exit status"):
        assert words in result.stdout
