"""`retrograde plan`: what it prints, what it writes, and a sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

import retrograde as rg
from retrograde.cli._app import app
from retrograde.engine.torch_internals import VERSION

MODEL = """
import collections, torch, retrograde as rg
from torch import nn

def make():
    torch.manual_seed(0)
    branch = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return rg.ReversibleSequence([rg.two_stream(branch(), branch()) for _ in range(6)]), torch.randn(256, 32)

def counted():
    print(f"on {torch.get_num_threads()} threads")
    return make()

def two():
    return nn.Sequential(make()[0], make()[0]), torch.randn(16, 32)

def wrong_shape():
    return make()[0], torch.randn(4, 9)

def refuses():
    class Refuses(nn.Module):
        def forward(self, x): raise ValueError("size 32 is odd")
    return nn.Sequential(Refuses(), make()[0]), torch.randn(4, 32)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = make()[0]

    def forward(self, x):
        return self.stack(x)

class Asks(Net):
    def forward(self, x):
        return self.stack(x / x.max().item())

class Selects(Net):
    def forward(self, x):
        return self.stack(x[x.sum(-1).nonzero()[:, 0]])

def asks():
    return Asks(), torch.randn(8, 32)

def selects():
    return Selects(), torch.randn(8, 32)

def named():
    return Net(), collections.UserDict(x=torch.randn(8, 32))

def compiled():
    model, batch = make()
    model.compile(backend="retrograde")
    return model, batch

def plain():
    return nn.Linear(2, 2), torch.randn(2, 2)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "planned_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, ["plan", *args])


def test_a_plan_is_printed_beside_what_was_measured_and_saved(run: Any, tmp_path: Path) -> None:
    result = run("planned_model.py:make", "--budget", "2MiB", "--save", "new/plan.json", "--plot", "curve")
    assert result.exit_code == 0, result.output
    for name in ("store", "checkpoint each block", "checkpoint √n", "reverse", "this budget's plan"):
        assert name in result.stdout
    plan = rg.Plan.from_json((tmp_path / "new/plan.json").read_text())
    assert len(plan.memory) == 6
    assert str(plan) in result.stdout
    assert (tmp_path / "curve").stat().st_size > 10_000


def test_json_is_all_that_is_printed(run: Any) -> None:
    result = run("planned_model.py:make", "--budget", "1GiB", "--json")
    printed = json.loads(result.stdout)
    assert printed["memory"] == ["store"] * 6
    assert {way["name"] for way in printed["ways"]} >= {"store", "reverse", "checkpoint √n"}
    assert printed["minimum"] <= printed["peak"]


@pytest.mark.usefixtures("run")
def test_a_terminal_without_a_root_sign_gets_a_word() -> None:
    result = CliRunner(charset="ascii").invoke(app, ["plan", "planned_model.py:make", "--budget", "1GiB"])
    assert result.exit_code == 0, result.output
    assert "checkpoint sqrt(n)  " in result.stdout


def test_of_several_stacks_one_is_planned_by_its_name(run: Any) -> None:
    result = run("planned_model.py:two", "--budget", "1GiB", "--stack", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["memory"] == ["store"] * 6


def test_a_batch_by_name_may_be_any_mapping(run: Any) -> None:
    """As tokenizers of Hugging Face Transformers return one."""
    result = run("planned_model.py:named", "--budget", "1GiB")
    assert result.exit_code == 0, result.output


def test_the_model_runs_on_as_many_threads_as_asked_for(run: Any) -> None:
    before = torch.get_num_threads()
    result = run("planned_model.py:counted", "--budget", "1GiB", "--threads", str(before + 1))
    assert f"on {before + 1} threads" in result.stderr
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (("planned_model.py:make", "--budget", "10kB"), 1, "No plan fits 9.77 KiB: the least"),
        (("planned_model.py:make", "--budget", "a lot"), 2, "not a size"),
        (("planned_model.py:plain", "--budget", "1GiB"), 1, "Linear contains no retrograde.ReversibleSequence"),
        (("nowhere.py:make", "--budget", "1GiB"), 2, "There is no file nowhere.py"),
        (("planned_model.py:two", "--budget", "1GiB"), 1, "2 ReversibleSequences, where one is meant: '0', '1'."),
        (("planned_model.py:two", "--budget", "1GiB", "--stack", "2"), 2, "no ReversibleSequence '2'; it has '0', '1'"),
        (("planned_model.py:wrong_shape", "--budget", "1GiB"), 1, "Cannot plan: a training step raised RuntimeError"),
        (("planned_model.py:refuses", "--budget", "1GiB"), 1, "size 32 is odd"),
        (("planned_model.py:make", "--budget", "1GiB", "--save", "planned_model.py/p"), 2, "--save planned_model.py/p"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(run: Any, args: tuple[str, ...], status: int, sentence: str) -> None:
    result = run(*args)
    assert result.exit_code == status
    assert sentence in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.skipif(VERSION < (2, 13), reason='backend="retrograde" needs torch 2.13')
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_plan_of_a_compiled_model_is_printed_and_saved(run: Any, tmp_path: Path) -> None:
    result = run("planned_model.py:compiled", "--budget", "1GiB", "--json", "--save", "plan.json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["memory"] == ["store"] * 6
    assert rg.Plan.from_json((tmp_path / "plan.json").read_text()) == rg.Plan.uniform("store", 6)


# For another machine

ON = ("--on", "h100-80gb")


def test_a_plan_for_another_machine_is_printed_saved_and_drawn(run: Any, tmp_path: Path) -> None:
    args = ("--ranks", "8", "--shard", "fsdp2", "--budget", "1MB", "--save", "plan.json", "--plot", "plan.png")
    result = run("planned_model.py:make", *ON, *args)
    assert result.exit_code == 0, result.output
    for words in ("Predicted for 8 x NVIDIA H100 SXM, 80 GB, fsdp2", "all-gathers", "not measured", "too large"):
        assert words in result.stdout
    assert len(rg.Plan.from_json((tmp_path / "plan.json").read_text()).memory) == 6
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_json_of_a_plan_for_another_machine_is_all_that_is_printed(run: Any) -> None:
    printed = json.loads(run("planned_model.py:make", *ON, "--json").stdout)
    assert (printed["predicted"], printed["device"], printed["best"]) == (True, "h100-80gb", "store")


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (("planned_model.py:make", "--on", "h1"), 2, "on='h1' is not known; choose one of t4-16gb"),
        (("planned_model.py:make", *ON, "--ranks", "2", "--shard", "zero"), 2, "choose one of 'none', 'ddp', 'fsdp2'"),
        (("planned_model.py:make", *ON, "--budget", "1kB"), 1, "Nothing fits 1000 B: the least that a rank needs is"),
        (("planned_model.py:asks", *ON), 2, "planned_model.py, line 35: `return self.stack(x / x.max().item())`"),
        (("planned_model.py:selects", *ON), 2, "planned_model.py, line 39: `return self.stack(x[x.sum(-1).nonzero()"),
        (("planned_model.py:wrong_shape", *ON), 2, "The training step failed on tensors without values"),
        (("planned_model.py:make", "--budget", "1GiB", "--ranks", "2"), 2, "--ranks needs --on"),
        (("planned_model.py:make", "--budget", "1GiB", "--fused"), 2, "--fused needs --on, the device to plan for"),
        (("planned_model.py:make", "--budget", "1GiB", "--micro-batches", "2"), 2, "--micro-batches needs --on"),
        (("planned_model.py:make", *ON, "--budget", "100GiB"), 2, "A budget of 100 GiB is more than h100-80gb has"),
        (
            ("planned_model.py:two", *ON, "--save", "p.json"),
            2,
            "--save p.json: a plan is for one stack. Choose it with",
        ),
        (("planned_model.py:plain", *ON), 2, "Linear contains no retrograde.ReversibleSequence"),
    ],
)
def test_a_mistake_in_a_plan_for_another_machine_is_explained(
    run: Any, args: tuple[str, ...], status: int, sentence: str
) -> None:
    result = run(*args)
    assert result.exit_code == status
    assert sentence in result.stderr
    assert "Traceback" not in result.output
