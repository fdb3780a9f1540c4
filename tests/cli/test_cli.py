"""The command line: what it prints, its exit status, and a message for every mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retrograde

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

import typer
from typer.testing import CliRunner

from retrograde.cli._app import COMMANDS, app
from retrograde.cli._ending import ending_in_a_sentence
from retrograde.diagnose import Diagnosis

MODELS = """
import torch, retrograde as rg
from torch import nn

print("loading")

def stack(depth=3, keep=1.0):
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(keep=keep)
    return rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Tanh(), coupling=coupling) for _ in range(depth)])

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = stack()
    def forward(self, x, *, scale):
        return self.stack(x * scale)

def healthy(): return stack(), torch.randn(4, 8)
def drifting(): return stack(8, 0.1), (torch.randn(4, 8),)
def named(): return Named(), {"x": torch.randn(4, 8), "scale": 2.0}, lambda y: y.square().mean()
def nan(): return stack(), torch.full((4, 8), float("nan"))
def plain(): return nn.Linear(8, 8), torch.randn(4, 8)
def wrong_shape(): return stack(), torch.randn(4, 9)
def raises(): raise RuntimeError("no weights")
def alone(): return stack()
def bad_batch(): return stack(), 3
def bad_loss(): return stack(), torch.randn(4, 8), "mse"
number = 3
"""

Run = Callable[..., Any]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "some_models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import torch\nimport a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("some_models", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda *args: CliRunner().invoke(app, ["doctor", *args])


def test_a_healthy_model_is_shown_with_status_zero(doctor: Run) -> None:
    result = doctor("some_models.py:healthy")
    assert result.exit_code == 0
    assert "Healthy: all 3 blocks" in result.stdout
    assert "Linear · Tanh" in result.stdout


def test_a_fault_is_shown_with_status_one_and_what_to_change(doctor: Run) -> None:
    result = doctor("some_models.py:drifting")
    assert result.exit_code == 1
    assert "first past tolerance" in result.stdout
    assert "What to change, as measured:" in result.stdout
    assert doctor("some_models.py:drifting", "--tolerance", "1e9").exit_code == 0


def test_a_terminal_gets_the_same_in_colour(doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    result = doctor("some_models.py:drifting")
    assert "\x1b[1;31m" in result.stdout, "the first block past tolerance is in bold red"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    for words in ("first past tolerance", "Peak memory", "What to change, as measured:", "Fault: on the way back"):
        assert words in plain


def test_stdout_is_only_json_and_can_be_read_back_as_a_diagnosis(doctor: Run) -> None:
    result = doctor("some_models.py:healthy", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["healthy"] is True
    assert Diagnosis.from_json(result.stdout).stacks[0].blocks[2].name == "Linear · Tanh"
    assert "loading" in result.stderr, "what the user's code prints goes to the error stream"


def test_a_module_by_name_and_a_batch_by_name_with_a_loss_are_examined(doctor: Run) -> None:
    assert doctor("some_models:named").exit_code == 0


def test_the_picture_is_written(doctor: Run, tmp_path: Path) -> None:
    result = doctor("some_models.py:healthy", "--plot", "picture.png")
    assert result.exit_code == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "picture.png" in result.stderr


MISTAKES = {
    "some_models.py": "does not name a factory. Write module:factory",
    "nowhere.py:make": "There is no file nowhere.py.",
    "nowhere:make": "There is no module 'nowhere'.",
    "some_models.py:healthi": "has no 'healthi'. It defines stack, Named, healthy",
    "some_models.py:number": "is a value of type int, not a function",
    "some_models.py:raises": "raised RuntimeError: no weights (some_models.py, line",
    "some_models.py:alone": "returned ReversibleSequence. It must return (model, batch)",
    "some_models.py:bad_batch": "The batch that some_models.py:bad_batch returned is a int",
    "some_models.py:bad_loss": "The loss that some_models.py:bad_loss returned is a str",
    "broken.py:make": "No module named 'a_module_that_nobody_has' (broken.py, line 2)",
    "broken:make": "No module named 'a_module_that_nobody_has' (broken.py, line 2)",
}


@pytest.mark.parametrize("target", MISTAKES)
def test_a_target_that_cannot_be_loaded_is_explained_with_status_two(doctor: Run, target: str) -> None:
    result = doctor(target)
    assert result.exit_code == 2
    assert MISTAKES[target] in result.stderr
    assert not result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nan", "block 0, branch Linear, returns NaN or infinity"),
        ("plain", "Linear contains no retrograde.ReversibleSequence"),
        ("wrong_shape", "The forward pass raised RuntimeError"),
    ],
)
def test_a_model_that_cannot_be_examined_is_explained_with_status_one(doctor: Run, target: str, words: str) -> None:
    result = doctor(f"some_models.py:{target}", "--json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Cannot examine: ")
    assert words in result.stderr
    assert not result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tolerance", "0"], "greater than 0"),
        (["--tolerance", "much"], "Invalid value"),
        (["--plot", "no_such_folder/p.png"], "no_such_folder"),
        (["--plot", "p.nonsense"], "nonsense"),
        (["--colour"], "--colour"),
    ],
)
def test_wrong_options_have_status_two(doctor: Run, options: list[str], words: str) -> None:
    result = doctor("some_models.py:healthy", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_help_has_examples_and_says_that_the_file_is_run() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for words in ("def make():", "retrograde doctor my_model.py:make", "run as Python", "Exit status"):
        assert words in result.stdout
    overview = CliRunner().invoke(app, ["--help"]).stdout
    assert all(command.__name__ in overview for command in COMMANDS)


def test_the_command_runs_with_python_m_retrograde(doctor: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "retrograde", "doctor", "some_models.py:nan"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert run.stderr.startswith("loading\nCannot examine: block 0, branch Linear,")


def test_version_prints_the_version_and_nothing_else() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"retrograde {retrograde.__version__}\n"
    run = subprocess.run([sys.executable, "-m", "retrograde", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == result.stdout


def test_without_typer_a_message_names_the_extra() -> None:
    code = "import sys; sys.modules['typer'] = None; import retrograde.cli; retrograde.cli.main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "pip install 'retrograde[cli]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_error_that_nobody_foresaw_is_one_line_and_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("oh")

    with pytest.raises(typer.Exit):
        ending_in_a_sentence(broken)()
    monkeypatch.setenv("RETROGRADE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        ending_in_a_sentence(broken)()


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "a\0b.py:make"],
        ["doctor", "some_models.py:healthy", "--plot", "a\0b"],
        ["plan", "some_models.py:healthy", "--budget", "a\0b"],
    ],
)
@pytest.mark.usefixtures("doctor")
def test_a_path_with_a_nul_is_explained(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "NUL character" in result.stderr or "null byte" in result.stderr  # the latter in the words of typer
    assert "Traceback" not in result.output
