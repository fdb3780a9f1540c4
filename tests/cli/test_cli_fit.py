"""`retrograde fit --on`: sizes for a machine that is not here, and a sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

from retrograde.cli._app import app
from retrograde.engine.torch_internals import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 13), reason="plans for another machine need torch 2.13")

MODEL = """
import torch, retrograde as rg
from torch import nn

def make(batch=4, length=8, depth=2):
    branch = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    blocks = [rg.two_stream(branch(), branch()) for _ in range(depth)]
    return rg.ReversibleSequence(blocks).cuda(), torch.randn(batch, length, 16, device="cuda")

def own_optimizer(depth=2):
    model, x = make(depth=depth)
    return model, x, None, torch.optim.AdamW(model.parameters(), lr=1e-3)

def plain(batch=4):
    return nn.Linear(2, 2), torch.randn(batch, 2)

def asks(batch=4):
    return make(int(torch.randn(batch).abs().sum().item()))

def wrong_shape(batch=4):
    return make(batch)[0], torch.randn(batch, 9)

def other_sizes(width=4):
    return make()

def stage(batch, stage, stages):
    return make(batch, depth=4 // stages)
"""
ON = ("--on", "h100-80gb")
QUICK = ("--mode", "reverse", "--high", "2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "fitted_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return lambda factory, *args: CliRunner().invoke(app, ["fit", f"fitted_model.py:{factory}", *args])


def sizes(result: Any) -> dict[str, int | None]:
    assert result.exit_code in (0, 1), result.output
    return {each["memory"]: each["size"] for each in json.loads(result.stdout)["largest"]}


def test_sizes_are_printed_as_predictions_and_trials_on_the_error_stream(run: Any) -> None:
    result = run("make", *ON, "--memory", "400kB", "--mode", "store", "--low", "8", "--multiple-of", "8")
    assert result.exit_code == 0, result.output
    first, header, row = result.stdout.splitlines()
    assert first == "fitted_model.py:make on 1 x h100-80gb, predicted, under 391 KiB"
    assert header.split() == ["memory", "largest", "batch", "peak", "trials", "seconds"]
    assert row.split()[:2] == ["store", "24"]
    assert "store, batch 32: too large at" in result.stderr


def test_json_is_all_that_is_printed_and_has_every_trial(run: Any) -> None:
    result = run("make", *ON, "--memory", "400kB", "--json")
    found = json.loads(result.stdout)
    assert found["memory_limit"] == 400_000
    assert sizes(result)["reverse"] > sizes(result)["store"]
    for each in found["largest"]:
        peaks = {trial["size"]: trial["peak"] for trial in each["trials"]}
        assert peaks[each["size"]] == each["peak"] <= 400_000
        assert {trial["outcome"] for trial in each["trials"] if trial["size"] > each["size"]} <= {"too large"}


def test_the_limit_is_the_device_s_memory_unless_one_is_given(run: Any, tmp_path: Path) -> None:
    figures = {"memory": "100kB", "bandwidth": 1e11, "flops": {"float32": 1e13}}
    (tmp_path / "small.json").write_text(json.dumps(figures))
    args = ("--mode", "reverse", "--high", "64", "--json")
    small = run("make", "--on", "small.json", *args)
    assert json.loads(small.stdout)["memory_limit"] == 100_000
    assert sizes(small) == sizes(run("make", *ON, "--memory", "100kB", *args))


def test_length_and_depth_are_varied(run: Any) -> None:
    for vary in ("length", "depth"):
        found = sizes(
            run("make", *ON, "--vary", vary, "--memory", "150kB", "--mode", "reverse", "--high", "64", "--json")
        )
        assert found["reverse"] is not None
        assert 1 < found["reverse"] < 64


def test_more_ranks_hold_a_deeper_model(run: Any) -> None:
    args = (*ON, "--vary", "depth", "--memory", "100kB", "--mode", "reverse", "--high", "64", "--json")
    alone, together = run("make", *args), run("make", *args, "--ranks", "4", "--shard", "fsdp2")
    assert sizes(together)["reverse"] > sizes(alone)["reverse"]


def test_a_fused_optimiser_of_the_command_and_one_of_the_factory_are_simulated(run: Any) -> None:
    args = (*ON, "--vary", "depth", "--memory", "150kB", "--mode", "reverse", "--json")
    assert sizes(run("own_optimizer", *args)) == sizes(run("make", *args))
    assert sizes(run("make", *args, "--fused"))["reverse"] > sizes(run("make", *args))["reverse"]
    assert sizes(run("make", *args, "--optimizer", "sgd"))["reverse"] > sizes(run("make", *args))["reverse"]


def test_a_stage_of_a_pipeline_is_fitted(run: Any) -> None:
    result = run("stage", *ON, "--ranks", "2", "--shard", "pipeline", *QUICK)
    assert result.exit_code == 0, result.output
    assert "2 or more" in result.stdout


def test_nothing_that_fits_is_status_1(run: Any) -> None:
    result = run("make", *ON, "--memory", "1kB", *QUICK)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].split()[:2] == ["reverse", "none"]


@pytest.mark.parametrize(
    ("factory", "args", "status", "sentence"),
    [
        ("make", ("--on", "h1"), 2, "on='h1' is not known; choose one of t4-16gb"),
        ("make", ("--on", "none.json"), 2, "there is no such file to read a device from"),
        ("make", (*ON, "--ranks", "2", "--shard", "zero"), 2, "shard='zero' is not known; choose one of 'none', 'ddp'"),
        ("make", (*ON, "--ranks", "2"), 2, "ranks=2 need to know what they share"),
        ("make", (*ON, "--shard", "fsdp2"), 2, "shard='fsdp2' needs several ranks"),
        ("make", (*ON, "--ranks", "3", "--shard", "hsdp"), 2, "an even number up to 8, or a multiple of 8"),
        ("make", (*ON, "--ranks", "2", "--shard", "ddp", "--fused"), 2, "fused=True with shard='ddp'"),
        ("make", (*ON, "--memory", "500GiB"), 2, "A budget of 500 GiB is more than h100-80gb has: 74.5 GiB"),
        ("make", (*ON, "--memory", "a lot"), 2, "not a size"),
        ("make", (*ON, "--optimizer", "adamx"), 2, "optimizer='adamx' is not known"),
        ("make", (*ON, "--precision", "int4"), 2, "precision='int4' is not known"),
        ("make", (*ON, "--mode", "stor"), 2, "memory='stor' is not known"),
        ("make", (*ON, "--vary", "width"), 2, "vary='width' is not known"),
        ("make", (*ON, "--low", "9", "--high", "8"), 2, "there is no size from 1 to try"),
        ("make", (), 2, "Missing option '--memory'"),
        ("make", ("--memory", "1GiB", "--ranks", "2", "--fused"), 2, "--ranks, --fused needs --on"),
        ("plain", ON, 2, "Linear contains no retrograde.ReversibleSequence"),
        ("missing", ON, 2, "fitted_model.py has no 'missing'. It defines make"),
        ("other_sizes", ON, 2, "unexpected keyword argument 'batch'"),
        ("asks", ON, 2, "fitted_model.py, line 18: `return make(int(torch.randn(batch).abs().sum().item()))`"),
        ("wrong_shape", ON, 2, "The training step failed on tensors without values"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(
    run: Any, factory: str, args: tuple[str, ...], status: int, sentence: str
) -> None:
    result = run(factory, *args)
    assert result.exit_code == status, result.output
    assert sentence in result.stderr
    assert "fault of retrograde" not in result.stderr
    assert result.stdout == ""


def test_what_a_model_raises_is_not_blamed_on_retrograde(run: Any, tmp_path: Path) -> None:
    (tmp_path / "fitted_model.py").write_text(
        MODEL
        + """
class Refuses(nn.Module):
    def forward(self, x): raise RuntimeError("size 16 is odd")

def refuses(batch=4):
    return nn.Sequential(Refuses(), make()[0]), torch.randn(batch, 16)
"""
    )
    result = run("refuses", *ON)
    assert result.exit_code == 1
    assert "Cannot simulate a training step: it raised RuntimeError: size 16 is odd" in result.stderr
    assert "fault of retrograde" not in result.stderr
