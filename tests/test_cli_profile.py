"""`retrograde profile`: where a step's memory goes, over time and by block, and what its peak is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
pytest.importorskip("matplotlib", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

import retrograde as rg
from retrograde.cli._app import app
from retrograde.diagnose import MemoryTracker
from retrograde.diagnose._profile import AFTER, BEFORE, KEPT, OWN, Profile, profile
from retrograde.models import ReversibleLM

MODELS = """
import torch, retrograde as rg
from torch import nn

print("loading")

def stack(depth=6):
    return rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)])

def deep(): return stack(), torch.randn(64, 8)
def plain(): return nn.Linear(8, 8), torch.randn(4, 8)
def wrong_shape(): return stack(), torch.randn(4, 9)
def raises(): raise RuntimeError("no weights")
"""
Run = Callable[..., Any]


def branch(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))


def stack(depth: int) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(branch(), branch()) for _ in range(depth)])


def by_mode(found: Profile) -> dict[str, Any]:
    return {mode.memory: mode for mode in found.modes}


@pytest.fixture(scope="module")
def deep() -> Profile:
    torch.manual_seed(0)
    return profile(stack(12), torch.randn(64, 16))


def test_stored_blocks_go_up_forward_and_down_backward(deep: Profile) -> None:
    store = by_mode(deep)["store"]
    totals = [sum(kinds) for kinds in store.timeline]
    assert totals[store.top] == max(totals) == store.peak
    fourths = [totals[store.turn * i // 4] for i in range(4)]
    assert fourths == sorted(fourths)
    rest = len(totals) - store.turn
    falling = [totals[store.turn + rest * i // 4] for i in range(4)]
    assert falling == sorted(falling, reverse=True)
    kept = {block.kept for block in store.blocks[:-1]}
    assert len(kept) == 1, "equal blocks keep the same"
    assert store.blocks[-1].peak > 2 * store.blocks[0].peak


def test_reversed_blocks_keep_nothing_but_the_last_step_and_are_flat(deep: Profile) -> None:
    reverse = by_mode(deep)["reverse"]
    assert all(block.kept == 0 for block in reverse.blocks[:-2]), "the last step reads what the block before it made"
    assert len({block.peak for block in reverse.blocks[1:-2]}) == 1
    assert by_mode(deep)["store"].peak > by_mode(deep)["checkpoint"].peak > reverse.peak


def test_the_parts_add_up_to_the_peak_and_the_kinds_to_the_timeline(deep: Profile) -> None:
    for mode in deep.modes:
        assert sum(part.bytes for part in mode.parts) == mode.peak
        assert mode.timeline[mode.top] == tuple(mode.held(kind) for kind in (BEFORE, KEPT, AFTER, OWN))
        assert all(min(kinds) >= 0 for kinds in mode.timeline)


def test_the_peak_is_the_trackers(deep: Profile) -> None:
    """Of the same step, measured without any of this."""
    torch.manual_seed(0)
    model, x = stack(12), torch.randn(64, 16)
    for memory in ("store", "reverse"):
        model.memory = memory
        for _ in range(2):  # so that the gradients are there to be ignored
            with MemoryTracker(ignore=[model, x]) as tracker:
                (model(x) ** 2).mean().backward()
        assert by_mode(deep)[memory].peak == pytest.approx(tracker.peak, rel=0.1)


def test_the_sentence_names_stored_activations_and_what_reversing_measured(deep: Profile) -> None:
    assert deep.sentences["store"].startswith(
        "The peak is the activations that are kept for the backward pass in 12 blo"
    )
    reverse = by_mode(deep)["reverse"]
    assert f'memory="reverse" peaks at {reverse.peak / 1024:.1f} KiB, measured.' in deep.advice["store"]
    assert deep.sentences["reverse"].startswith("The peak is one block's own step and its streams, ")
    assert "does not grow with depth" in deep.advice["reverse"]


def test_the_sentence_names_the_logits_where_they_are_the_peak() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(3000, (2, 32))
    model = ReversibleLM(3000, 16, 4, 2)
    found = profile(model, tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), tokens.flatten()), modes=["reverse"])
    assert found.sentences["reverse"].startswith("The peak is the output (2 × 32 × 3000, 750.0 KiB) and what the loss")
    assert found.sentences["reverse"].endswith("not the blocks.")
    assert "chunked_cross_entropy" in found.advice["reverse"]


def test_the_advice_helps() -> None:
    """The loss a part at a time, as advised, has the blocks as its peak, and a lower one."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ReversibleLM(3000, 16, 4, 2, loss_chunk=4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model.loss(tokens)

    tokens = torch.randint(3000, (2, 33))
    found = profile(Chunked(), tokens, loss=lambda y: y, modes=["reverse"]).modes[0]
    whole = profile(
        ReversibleLM(3000, 16, 4, 2), tokens[:, :-1], modes=["reverse"],
        loss=lambda y: F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten()),
    ).modes[0]  # fmt: skip
    assert found.peak < whole.peak / 2


def test_what_comes_before_the_blocks_is_named_too() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Sequential(nn.Linear(16, 4000), nn.GELU(), nn.Linear(4000, 16))
            self.stack = stack(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack(self.enter(x))  # type: ignore[no-any-return]

    found = profile(Wide(), torch.randn(64, 16), modes=["reverse"])
    assert found.sentences["reverse"].startswith("The peak is what comes before the blocks")


def test_the_model_is_left_as_it_was_found() -> None:
    model, x = stack(3), torch.randn(4, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = model.memory
    profile(model, x)
    assert model.memory is plan
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


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
    found = json.loads(result.stdout)
    assert [mode["memory"] for mode in found["modes"]] == ["reverse"]
    assert len(found["modes"][0]["blocks"]) == 6
    assert "loading" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["profiled_models.py:deep", "--mode", "revers"], 2, "--mode revers: there is store, checkpoint, reverse"),
        (["profiled_models.py:deep", "--output", "profiled_models.py/x"], 2, "--output profiled_models.py/x"),
        (["nowhere.py:make"], 2, "There is no file nowhere.py."),
        (["profiled_models.py:raises"], 2, "raised RuntimeError: no weights"),
        (["profiled_models.py:plain"], 1, "Cannot profile: Linear contains no retrograde.ReversibleSequence"),
        (["profiled_models.py:wrong_shape"], 1, "Cannot profile: The model raised RuntimeError"),
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
