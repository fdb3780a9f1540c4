"""The configuration: its keys and defaults, and a message for each mistake."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from retrograde.training import Config, ConfigError, config_of, read_config

EXAMPLE = resources.files("retrograde.training").joinpath("example.toml").read_text(encoding="utf-8")


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_the_example_has_every_key_with_its_default(tmp_path: Path) -> None:
    example = read_config(written(tmp_path, EXAMPLE)).to_dict()
    defaults = Config().to_dict()
    example["data"]["path"], example["output"]["folder"] = "", "run"
    assert example == defaults
    for table, values in defaults.items():
        part = EXAMPLE.split(f"[{table}]")[1].split("\n[")[0]
        for key in values:
            assert f"\n{key} = " in part or f"\n# {key} = " in part, f"{table}.{key} is not in the example"


def test_paths_are_relative_to_the_folder_of_the_file(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, '[data]\npath = "a.txt"'))
    assert config.data.path == str(tmp_path / "a.txt")
    assert config.output.folder == str(tmp_path / "run")


def test_an_override_takes_precedence_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[data]\npath = "a.txt"\n[training]\nsteps = 5\nwarmup = 0')
    assert read_config(path, {"training.steps": 7, "model.exact": True}).training.steps == 7
    with pytest.raises(ConfigError, match=r"there is no table \[trainig\]"):
        read_config(path, {"trainig.steps": 7})


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"modle": {}}, "there is no table [modle]. The tables are model, data, training, evaluation, output."),
    ({"model": {"widht": 3}}, "[model] has no widht. It has width, depth, heads"),
    ({"model": 3}, "model = 3 is a value; write a table, [model]."),
    ({"model": {"width": "64"}}, "model.width = '64' must be a whole number."),
    ({"model": {"width": 64.0}}, "model.width = 64.0 must be a whole number."),
    ({"model": {"exact": 40}}, "model.exact = 40 must be true or false."),
    ({"model": {"exact": True, "grid_bits": 40}}, "model.grid_bits = 40 is not a number of bits from 1 to 22."),
    ({"model": {"grid_bits": 12}}, "model.grid_bits = 12 is for exact streams: set model.exact = true too."),
    ({"model": {"exact": "yes"}}, "model.exact = 'yes' must be true or false."),
    ({"model": {"depth": 0}}, "model.depth = 0 must be 1 or more."),
    ({"model": {"width": 30}}, "model.width = 30 cannot be shared by model.heads = 4 heads"),
    ({"model": {"kv_heads": 3}}, "model.kv_heads = 3 does not divide model.heads = 4."),
    ({"model": {"dropout": 1.0}}, "model.dropout = 1.0 is not a fraction"),
    (
        {"model": {"memory": "revers"}},
        "model.memory='revers' is not known; choose one of 'reverse', 'selective', 'checkpoint'",
    ),
    ({"data": {"path": ""}}, "data.path is missing"),
    ({"data": {"validation": -0.1}}, "data.validation = -0.1 is not a fraction"),
    ({"data": {"tokens": "uint16"}}, 'data.tokens = "uint16" needs data.vocabulary'),
    ({"data": {"vocabulary": 9}}, "data.vocabulary is for files of tokens"),
    ({"training": {"learning_rate": 0}}, "training.learning_rate = 0.0 is not above 0."),
    ({"training": {"learning_rate": float("nan")}}, "training.learning_rate = nan is not above 0."),
    ({"training": {"betas": [0.9]}}, "training.betas = [0.9] must be a list of 2 numbers."),
    ({"training": {"betas": [0.9, 1.0]}}, "training.betas = [0.9, 1.0]: each is from 0"),
    ({"training": {"warmup": 2000}}, "training.warmup = 2000 is longer than training.steps = 1000."),
    ({"training": {"batch": 5, "accumulate": 2}}, "cannot be cut into training.accumulate = 2 equal parts."),
    ({"training": {"final_rate": 2}}, "training.final_rate = 2.0 is not a fraction"),
    ({"training": {"clip": -1.0}}, "training.clip = -1.0 must be 0 or more."),
    ({"training": {"schedule": "steps"}}, "training.schedule='steps' is not known; choose one of 'cosine'"),
    ({"output": {"keep": 0}}, "output.keep = 0 must be 1 or more."),
    ({"output": {"folder": ""}}, "output.folder is empty"),
]


@pytest.mark.parametrize(("tables", "words"), MISTAKES, ids=lambda value: str(value)[:50])
def test_a_mistake_is_explained(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(_joined(tables))
    assert words in str(caught.value)


def _joined(tables: dict[str, Any]) -> dict[str, Any]:
    return {**tables, "data": {"path": "a.txt", **tables.get("data", {})}}


def test_a_file_that_is_missing_or_not_toml_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml is not TOML: Invalid value"):
        read_config(written(tmp_path, "[data]\nsteps = ["))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(tmp_path)
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read_config(tmp_path / "config.toml")
