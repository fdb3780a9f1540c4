"""`retrograde convert`: its report, its exit status, and a clear sentence for every mistake."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

from retrograde.cli._app import app

MODELS = """
import torch
from torch import nn

print("loading")

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class Net(nn.Module):
    def __init__(self, kind=Layer, lists=1):
        super().__init__()
        self.lists = lists
        for i in range(lists):
            setattr(self, f"layers{i}", nn.ModuleList(kind() for _ in range(10)))
    def forward(self, x):
        for i in range(self.lists):
            for layer in getattr(self, f"layers{i}"):
                x = layer(x)
        return x

class Pair(Layer):
    def forward(self, x):
        return super().forward(x), 5

class Unpacks(Net):
    def forward(self, x):
        for layer in self.layers0:
            x = layer(x)[0]
        return x

class Huge(Layer):
    def forward(self, x):
        return x + 1e9 * self.attn(x)

def make():
    torch.manual_seed(0)
    return Net(), torch.randn(4, 9, 8)
def named(): return Net(), {"x": torch.randn(4, 9, 8)}, lambda y: (y - 1).square().mean()
def two(): return Net(lists=2), torch.randn(4, 9, 8)
def huge(): return Net(Huge), torch.randn(4, 9, 8)
def pairs(): return Unpacks(Pair), torch.randn(4, 9, 8)
def plain(): return nn.Linear(8, 8), torch.randn(4, 8)
def wrong_shape(): return Net(), torch.randn(4, 9)
def reversible():
    import retrograde as rg
    return rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]), torch.randn(4, 8)
def converted():
    import retrograde as rg
    model = Net()
    rg.convert(model, "scaled")
    return model, torch.randn(4, 9, 8)
class Odd(Layer):
    def forward(self, x):
        if hasattr(self, "called"):
            raise KeyError("odd")
        self.called = True
        return super().forward(x)
def odd(): return Net(Odd), torch.randn(4, 9, 8)
"""

Run = Callable[..., Any]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "residual.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "residual", raising=False)
    return lambda *args: CliRunner().invoke(app, ["convert", *args])


def row(output: str, label: str) -> str:
    return next(line for line in output.splitlines() if line.strip().startswith(label)).split(label)[1].strip()


def test_the_report_shows_what_the_conversion_does_and_the_status_is_zero(convert: Run) -> None:
    result = convert("residual.py:make", "--recipe", "bdia")
    assert result.exit_code == 0, result.output
    assert "10 layers in layers0" in result.stdout
    assert row(result.stdout, "against stock, eval: outputs differ by") == "0, to the bit"
    assert row(result.stdout, "against stored: error of gradients") == "0, to the bit"
    assert row(result.stdout, "against stored: error of recomputed streams") == "0, to the bit"
    assert row(result.stdout, "extra bits per element per layer") == "0.9"  # none in the first layer
    for label in ("peak, original", "peak, converted: checkpoint", "peak, converted: reverse"):
        assert row(result.stdout, label).endswith("KiB")
    assert 'rg.convert(model, "bdia")' in result.stdout


def test_several_recipes_with_their_own_values_are_shown_side_by_side(convert: Run) -> None:
    result = convert("residual.py:make", "--recipe", "two_stream", "--recipe", "momentum:beta=0.25")
    assert result.exit_code == 0, result.output
    assert re.split(" {2,}", row(result.stdout, "branches")) == ["attention and feed-forward", "layers"]
    assert row(result.stdout, "extra bits per element per layer").split() == ["0", "2"]
    assert "two_stream computes another function than the model was trained for" in result.stdout
    assert "recipes.Momentum(beta=0.25)" in result.stdout


def test_the_command_says_for_each_recipe_whether_training_computes_another_function(convert: Run) -> None:
    result = convert("residual.py:make", "--recipe", "unchanged", "--recipe", "bdia", "--recipe", "momentum")
    assert result.exit_code == 0, result.output
    columns = re.split(" {2,}", row(result.stdout, "training computes"))
    assert columns == [
        "the original function, to the bit",
        "another function, drawn at random in every call",
        "another function",
    ]
    differences = re.split(" {2,}", row(result.stdout, "against stock, training: gradients differ by"))
    assert differences[0] == "0, to the bit"
    assert all(0.001 < float(difference) < 2 for difference in differences[1:])
    assert re.split(" {2,}", row(result.stdout, "peak, converted: reverse"))[0] == "no inverse"
    assert "bdia trains another function than the model's" in result.stdout
    assert "momentum computes another function than the model was trained for" in result.stdout


def test_json_is_all_that_is_on_stdout(convert: Run) -> None:
    result = convert("residual.py:named", "--recipe", "bdia", "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    report = printed["reports"]["bdia"]
    assert printed["layers"] == "layers0"
    assert report["gradient_error"] == report["logits_difference"] == 0
    assert report["peaks"]["reverse"] < report["peaks"]["original"]
    assert report["loss_before"] == report["loss_after"] > 0
    assert "loading" in result.stderr, "what the user's code prints goes elsewhere"


def test_a_warning_of_the_conversion_becomes_a_note_after_the_report(convert: Run) -> None:
    result = convert("residual.py:huge", "--recipe", "bdia", "--json", "--grid-bits", "20")
    notes = json.loads(result.stdout)["notes"]
    assert any("continues with a grid of" in note for note in notes)
    assert f"Note: {notes[0]}" in result.stderr
    assert "Warning" not in result.stderr


def test_gradients_past_the_tolerance_have_status_one(convert: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograde.couplings import Exact

    monkeypatch.setattr(Exact, "separate", lambda self, combined, update: combined - 1.001 * update)
    assert convert("residual.py:make", "--recipe", "two_stream").exit_code == 1
    assert convert("residual.py:make", "--recipe", "two_stream", "--tolerance", "10").exit_code == 0


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (["residual.py:nowhere"], 2, "has no 'nowhere'"),
        (["residual.py:make", "--recipe", "adia"], 2, "recipe='adia' is not known; choose one of 'unchanged', 'bdia'"),
        (["residual.py:make", "--recipe", "scaled:kep=1"], 2, "scaled has no value 'kep'. It has keep."),
        (["residual.py:make", "--recipe", "bdia:gamma=1"], 2, "bdia has no value 'gamma'. It has no values."),
        (["residual.py:make", "--recipe", "scaled:keep=half"], 2, "could not convert string to float"),
        (["residual.py:make", "--recipe", "annealed:gamma=7"], 2, "give 0, or a value from 1/256 to 1"),
        (["residual.py:make", "--tolerance", "-1"], 2, "0 or greater"),
        (["residual.py:make", "--layers", "layers"], 2, "Net has no part 'layers' (layers=). Its lists are 'layers0'."),
        (["residual.py:two"], 1, "Net has 2 lists of two or more layers of one class: 'layers0', 'layers1'"),
        (["residual.py:plain"], 1, "Linear has no lists of two or more layers"),
        (["residual.py:wrong_shape"], 1, "a training step of the original residual.py:wrong_shape raised RuntimeError"),
        (
            ["residual.py:pairs", "--recipe", "bdia"],
            1,
            "Pair returned a value of type int as item 1, besides its hidden",
        ),
        (["residual.py:reversible"], 1, "ReversibleSequence is reversible already"),
        (["residual.py:converted"], 1, "'layers0' of Net is converted already"),
        (["residual.py:odd"], 1, "KeyError: 'odd' (residual.py, line"),
        (["."], 2, "has no config.json. Name a folder that save_pretrained wrote"),
    ],
)
def test_a_mistake_is_reported_in_a_sentence(convert: Run, args: list[str], status: int, sentence: str) -> None:
    result = convert(*args, "--json")
    assert result.exit_code == status
    assert sentence in result.stderr
    assert not result.stdout
    assert "Traceback" not in result.stderr


def test_one_of_two_lists_is_converted_by_its_name(convert: Run) -> None:
    result = convert("residual.py:two", "--layers", "layers1")
    assert "10 layers in layers1" in result.stdout
    assert 'rg.convert(model, "unchanged", layers="layers1")' in result.stdout


def test_help_has_examples_and_says_what_is_run() -> None:
    result = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for words in ("def make():", "retrograde convert my_model.py:make", "run as Python", "Exit status", "safetensors"):
        assert words in result.stdout


class TestCheckpoints:
    """Folders as Hugging Face Transformers writes them."""

    def config(self, folder: Path, **values: Any) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    def test_pickled_weights_are_refused_without_being_read(self, convert: Run, tmp_path: Path) -> None:
        folder = self.config(tmp_path / "old", architectures=["GPT2LMHeadModel"], model_type="gpt2")
        (folder / "pytorch_model.bin").write_bytes(b"never to be read")
        result = convert("old")
        assert result.exit_code == 2
        assert "no weights in safetensors, only pytorch_model.bin. Loading a pickle can run code" in result.stderr

    def test_a_config_without_the_class_is_refused(self, convert: Run, tmp_path: Path) -> None:
        self.config(tmp_path / "nameless", model_type="gpt2")
        assert "does not name the model's class" in convert("nameless").stderr

    def test_a_class_that_transformers_lacks_is_refused(self, convert: Run, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        folder = self.config(tmp_path / "own", architectures=["MyModel"], auto_map={"AutoModel": "code.MyModel"})
        (folder / "code.py").write_text("raise SystemExit('ran')")
        (folder / "model.safetensors").write_bytes(b"")
        result = convert("own")
        assert result.exit_code == 2
        assert "Code that comes with a checkpoint is not run" in result.stderr

    @pytest.mark.interop
    @pytest.mark.parametrize("architecture", ["AutoModelForCausalLM", "AutoModel", "pipeline", "GPT2Config", "Trainer"])
    @pytest.mark.parametrize("model_type", ["gpt2", "evil"])
    def test_no_code_of_the_folder_is_run_and_nothing_is_asked(
        self, convert: Run, tmp_path: Path, architecture: str, model_type: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("transformers")
        folder = self.config(
            tmp_path / "evil",
            architectures=[architecture],
            model_type=model_type,
            auto_map=dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "code.Evil"),
        )
        (folder / "code.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
        (folder / "model.safetensors").write_bytes(b"")
        asked: list[str] = []
        monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
        result = convert("evil")
        assert result.exit_code == 2
        assert f"holds a {architecture}, which is no model of transformers" in result.stderr
        assert not asked
        assert not (tmp_path / "ran").exists()
        assert "Traceback" not in result.stderr

    @pytest.mark.interop
    @pytest.mark.parametrize("place", ["top", "part"])
    def test_a_model_of_transformers_is_read_by_its_class_whatever_auto_map_says(
        self, convert: Run, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tf = pytest.importorskip("transformers")
        text = tf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=6, n_head=2, bos_token_id=0)
        tf.GPT2LMHeadModel(text).save_pretrained(tmp_path / "own")
        path = tmp_path / "own" / "config.json"
        own = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "code.Evil")}
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, **own} if place == "top" else {**values, "part": own}))
        (tmp_path / "own" / "code.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
        monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail("it asked"))
        result = convert("own", "--json")
        assert result.exit_code == 0, result.output
        assert not (tmp_path / "ran").exists()

    @pytest.mark.interop
    @pytest.mark.parametrize("name", ["gpt2", "vit"])
    def test_the_report_of_a_checkpoint_is_that_of_its_model(self, convert: Run, tmp_path: Path, name: str) -> None:
        tf = pytest.importorskip("transformers")
        if name == "gpt2":
            ids = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
            config = tf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=6, n_head=2, **ids)
            tf.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        else:
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
            config = tf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
            tf.ViTForImageClassification(config).save_pretrained(tmp_path / name)
        result = convert(name, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)["reports"]["unchanged"]
        assert report["layers"] == 6
        assert report["gradient_error"] == report["logits_difference"] == 0

    @pytest.mark.interop
    def test_a_broken_file_of_weights_is_reported_in_a_sentence(self, convert: Run, tmp_path: Path) -> None:
        tf = pytest.importorskip("transformers")
        config = tf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
        tf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "cut")
        path = tmp_path / "cut" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:200])
        result = convert("cut")
        assert result.exit_code == 2, result.output
        assert "cut could not be read" in result.stderr
        assert "Traceback" not in result.stderr
