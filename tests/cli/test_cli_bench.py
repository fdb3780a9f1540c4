"""`retrograde bench`: what it measures, what it prints, and a clear sentence for every mistake."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

import retrograde as rg
from retrograde.cli._app import app
from retrograde.cli._bench_run import measure, ways_of
from retrograde.measure.targets import Target
from retrograde.planning import measured

MODELS = """
import torch, retrograde as rg
from torch import nn

print("loading")

def branch(): return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

def stack(depth=6, last=(), **options):
    torch.manual_seed(0)
    return rg.ReversibleSequence([*(rg.two_stream(branch(), branch()) for _ in range(depth)), *last], **options)

def make(): return stack(), torch.randn(128, 16)
def exact(): return stack(exact=True), (torch.randn(128, 16),)
def transition():
    last = [rg.transition(nn.Linear(16, 8), nn.Linear(16, 8))]
    return stack(3, last, memory=["reverse"] * 3 + ["checkpoint"]), torch.randn(128, 16)
def affine():
    coupling = rg.couplings.Affine(limit=1.0)
    net = lambda: nn.Linear(16, 32)
    return rg.ReversibleSequence([rg.two_stream(net(), net(), coupling=coupling)]), torch.randn(8, 16)
def two(): return nn.Sequential(stack(2), stack(2)), torch.randn(16, 16)
def plain(): return nn.Linear(2, 2), torch.randn(2, 2)
def wrong_shape(): return stack(), torch.randn(4, 9)
def bf16(): return stack().bfloat16(), torch.randn(16, 16).bfloat16()
def fp16(): return stack().half(), torch.randn(16, 16).half()
def meta(): return stack().to("meta"), torch.randn(16, 16, device="meta")
class Broken(nn.Module):
    def forward(self, x): return x / 0
def nan():
    blocks = [rg.two_stream(branch(), branch()), rg.two_stream(Broken(), branch())]
    return rg.ReversibleSequence(blocks), torch.randn(4, 16)
class Odd(BaseException): pass
def raises(): raise Odd("odd")
def stops(): raise KeyboardInterrupt
"""
MODES = ["store", "checkpoint", "reverse", "selective", "reverse exact"]
Run = Callable[..., Any]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "benched.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "benched", raising=False)
    return lambda *args: CliRunner().invoke(app, ["bench", *args, "--rounds", "3"])


def ways(result: Any) -> dict[str, dict[str, Any]]:
    return {way["name"]: way for way in json.loads(result.stdout)["ways"]}


def test_each_mode_is_measured_and_shown_with_a_picture(bench: Run, tmp_path: Path) -> None:
    result = bench("benched.py:make", "--threads", "1", "--plot", "new_folder/p.png")
    assert result.exit_code == 0, result.output
    assert "benched.py:make: cpu, 1 thread, 3 rounds" in result.stdout
    figures = r"x\d+\.\d\d +\d+\.\d\d-\d+\.\d\d +\d+\.\d +[\d.]+ [KM]iB +\d+%"
    for name in MODES:
        assert re.search(rf"^ {name} +{figures} *$", result.stdout, re.MULTILINE)
    assert (tmp_path / "new_folder/p.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_all_that_is_on_stdout_and_its_peaks_are_those_of_the_planner(bench: Run) -> None:
    result = bench("benched.py:make", "--json")
    figures = ways(result)
    assert list(figures) == MODES
    assert figures["reverse"]["peak"] < figures["checkpoint"]["peak"] < figures["store"]["peak"]
    assert figures["store"]["ratio"] == figures["store"]["low"] == 1
    assert all(0 < way["low"] <= way["ratio"] <= way["high"] for way in figures.values())
    assert json.loads(result.stdout)["rounds"] == 3
    assert "loading" in result.stderr

    namespace: dict[str, Any] = {}
    exec(MODELS, namespace)
    model, batch = namespace["make"]()
    assert figures["reverse"]["peak"] == measured(model, batch).peak


def test_a_budget_adds_its_plan(bench: Run) -> None:
    least = ways(bench("benched.py:make", "--json"))["reverse"]["peak"]
    figures = ways(bench("benched.py:make", "--json", "--plan", "1.2MB"))
    assert least < 1_200_000
    assert figures["plan"]["peak"] <= 1_200_000 * 1.05
    assert "The plan: blocks 0-5 store" in bench("benched.py:make", "--plan", "1GB").stdout


def test_an_exact_model_is_exact_in_every_mode(bench: Run) -> None:
    assert list(ways(bench("benched.py:exact", "--json"))) == MODES[:4]


def test_blocks_without_an_inverse_are_checkpointed(bench: Run) -> None:
    figures = ways(bench("benched.py:transition", "--json"))
    assert figures["reverse, where possible"]["plan"] == "blocks 0-2 reverse, 3 checkpoint"
    assert figures["reverse exact, where possible"]["plan"] == "blocks 0-2 reverse, 3 checkpoint"


def test_without_an_exact_form_of_the_couplings_reverse_exact_is_left_out(bench: Run) -> None:
    result = bench("benched.py:affine", "--json")
    assert list(ways(result)) == MODES[:4]
    assert "reverse exact is left out: Block 0" in result.stderr
    assert "Affine, which has no exact form" in result.stderr


def test_all_stacks_of_a_model_change_their_mode(bench: Run) -> None:
    figures = ways(bench("benched.py:two", "--json"))
    assert figures["reverse"]["peak"] < figures["store"]["peak"]
    assert figures["reverse"]["plan"] == "blocks 0-1 reverse"


def test_the_model_is_left_as_it_was() -> None:
    namespace: dict[str, Any] = {}
    exec(MODELS, namespace)
    stack, batch = namespace["make"]()
    stack.memory = plan = rg.Plan.uniform("reverse", 6, anchor_every=2)
    couplings = [step.coupling for block in stack for step in block.each_step()]
    generator = torch.get_rng_state()
    rows, refusals = measure(Target("made here", stack, batch), ways_of([stack]), 2, lambda *_: None)
    assert [row.name for row in rows] == MODES
    assert not refusals
    assert stack.memory == plan
    assert not stack.exact
    assert all(s.coupling is c for s, c in zip((s for b in stack for s in b.each_step()), couplings, strict=True))
    assert all(parameter.grad is None for parameter in stack.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert next(row.plan for row in rows if row.name == "reverse") == str(plan), "the user's anchors stay"


def test_without_a_target_a_model_of_the_package_is_measured(bench: Run) -> None:
    result = bench("--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == "retrograde.models.ReversibleLM"
    figures = ways(result)
    assert figures["reverse"]["peak"] < 0.25 * figures["store"]["peak"]


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (["benched.py:nowhere"], 2, "has no 'nowhere'"),
        (["nowhere.py:make"], 2, "There is no file nowhere.py"),
        (["benched.py:make", "--plan", "much"], 2, "not a size"),
        (["benched.py:make", "--threads", "0"], 2, "Invalid value"),
        (["benched.py:make", "--plan", "1kB"], 1, "No plan fits"),
        (["benched.py:two", "--plan", "1GB"], 1, "The model has 2 ReversibleSequences"),
        (["benched.py:plain"], 1, "Cannot measure: Linear contains no retrograde.ReversibleSequence"),
        (["benched.py:wrong_shape"], 1, "Cannot measure: a training step raised RuntimeError"),
        (["benched.py:make", "--plot", "benched.py/p.png"], 2, "--plot benched.py/p.png"),
    ],
)
def test_a_mistake_is_reported_in_a_sentence(bench: Run, args: list[str], status: int, sentence: str) -> None:
    result = bench(*args)
    assert result.exit_code == status
    assert sentence in result.stderr
    assert "Traceback" not in result.output


def test_help_has_examples_and_mentions_make_bench() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for words in ("def make():", "retrograde bench my_model.py:make", "run as Python", "Exit status", "make bench"):
        assert words in result.stdout


@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_a_model_in_low_precision_is_measured_without_the_grid_that_it_cannot_have(bench: Run, target: str) -> None:
    result = bench(f"benched.py:{target}", "--rounds", "2", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert [way["name"] for way in printed["ways"]] == MODES[:-1]
    assert "reverse exact is left out: An exact coupling needs float32 or float64 streams" in printed["left_out"][0]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("meta", "Cannot measure: The model or its batch is on the meta device"),
        ("nan", "block 1, branch Broken, returns NaN or infinity, from finite streams"),
    ],
)
def test_a_model_whose_figures_would_mean_nothing_is_an_error(bench: Run, target: str, words: str) -> None:
    for result in (
        bench(f"benched.py:{target}"),
        CliRunner().invoke(app, ["plan", f"benched.py:{target}", "--budget", "1GiB"]),
    ):
        assert result.exit_code == 1, result.output
        assert words.removeprefix("Cannot measure: ") in result.stderr
        assert not result.stdout


def test_what_is_no_exception_but_raised_is_told_too(bench: Run) -> None:
    result = bench("benched.py:raises")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("benched.py:raises raised Odd: odd (benched.py, line")


@pytest.mark.parametrize("command", ["bench", "doctor", "profile", "plan", "convert"])
@pytest.mark.usefixtures("bench")
def test_an_interrupt_is_told_in_one_line(command: str) -> None:
    result = CliRunner().invoke(
        app, [command, "benched.py:stops", *(["--budget", "1GiB"] if command == "plan" else [])]
    )
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Stopped."
    assert "Traceback" not in result.output


def test_the_words_of_the_table_are_explained_below_it(bench: Run) -> None:
    result = bench("benched.py:make", "--rounds", "2")
    for mode in MODES:
        assert f"\n{mode}: " in result.stdout
