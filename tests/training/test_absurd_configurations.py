"""Configurations that nobody means: each is an error in a sentence, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import runs
from retrograde.training import ConfigError, config_of, read_config
from retrograde.training._config import parse_value
from retrograde.training._data import read_corpus
from retrograde.training._loop import build_model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 5000, "nested too deeply"),
        ("[model]\nwidth = " + "9" * 5000, "is not TOML"),
        ("[model]\nwidth = " + "9" * 400, "model.width has 400 digits"),
        ("[training]\nlearning_rate = 1" + "0" * 400, "training.learning_rate has 401 digits"),
        ('data.path = "a"\n[training]\nlearning_rate = 1e400', "training.learning_rate = inf"),
        ('[data]\npath = "a\\u0000b"', "NUL"),
        ("\0", "is not TOML"),
        ("x" * (1 << 25), "cannot be a configuration"),
    ],
)
@pytest.mark.timeout(60)
def test_an_absurd_file_is_explained(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no such device")
@pytest.mark.timeout(60)
def test_a_device_is_no_configuration_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be a configuration"):
        read_config(Path("/dev/zero"))
    with pytest.raises(ConfigError, match="is a device or a pipe"):
        read_corpus(runs.config(tmp_path, data_path="/dev/zero").data)


def test_a_deeply_nested_value_on_the_command_line_is_explained() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_value("[" * 5000)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_width": 2**40, "model_heads": 1},
        {"model_width": 2**62},
        {"model_hidden": 2**61},
        {"model_depth": 2**40},
        {"model_depth": 60_000, "model_width": 2**14},
        {"training_batch": 2**50},
        {"evaluation_batches": 2**60},
        {"training_seed": 2**64},
        {"training_steps": 10**400},
    ],
)
@pytest.mark.timeout(60)
def test_absurd_numbers_are_refused_before_anything_is_built(tmp_path: Path, changes: dict[str, Any]) -> None:
    tables = runs.tables(tmp_path, **changes)

    def build() -> None:
        config = config_of(tables)
        build_model(config, read_corpus(config.data).vocabulary)

    with pytest.raises(ConfigError, match=r"digits|maximum|needs|larger than any"):
        build()


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    content = b"one\r\ntwo\rthree\n\xff\xfe\x00" * 40
    (tmp_path / "data.bin").write_bytes(content)
    settings = runs.tables(tmp_path, data_path=str(tmp_path / "data.bin"), data_tokens="bytes", data_validation=0.0)
    corpus = read_corpus(config_of(settings).data)
    assert bytes(corpus.seen.tolist()) == content
    text = runs.tables(tmp_path, data_path=str(tmp_path / "text"), data_validation=0.0)
    (tmp_path / "text").write_bytes(b"one\r\ntwo\rthree\n" * 40)
    corpus = read_corpus(config_of(text).data)
    assert corpus.vocabulary.decode(corpus.seen) == "one\ntwo\nthree\n" * 40, "characters: every line end is a newline"
