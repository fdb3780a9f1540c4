"""Runs that resume from earlier checkpoints, impossible numbers, and weights that are not saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import runs
from retrograde.training import CheckpointError, ConfigError, Options, TrainingError, load_model, read_config


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def stopping_after(steps: int) -> Any:
    left = iter(range(steps - 1, -1, -1))
    return lambda: next(left) == 0


def test_a_new_checkpoint_is_not_removed_in_favour_of_later_ones_of_an_earlier_run(tmp_path: Path) -> None:
    runs.trained(tmp_path, output_keep=3)
    start = tmp_path / "run" / "checkpoints" / "step-00000004"
    result = runs.trained(tmp_path, Options(start=start, stop=stopping_after(2)), output_keep=1)
    assert result.step == 6
    assert result.checkpoint.is_dir()
    assert names(tmp_path) == ["step-00000006", "step-00000008.left", "step-00000012.left"]


def test_resuming_from_before_a_damaged_checkpoint_always_leaves_a_good_one(tmp_path: Path) -> None:
    runs.trained(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    start = tmp_path / "run" / "checkpoints" / "step-00000008"
    runs.trained(tmp_path, Options(start=start, stop=stopping_after(2)), output_keep=1)
    assert runs.trained(tmp_path, output_keep=1).began == 10


def test_the_next_run_resumes_from_the_newest_run_not_from_the_latest_step(tmp_path: Path) -> None:
    runs.trained(tmp_path, output_keep=3)
    start, rate = tmp_path / "run" / "checkpoints" / "step-00000004", {"training_learning_rate": 1e-4}
    runs.trained(tmp_path, Options(start=start, accept_changes=True, stop=stopping_after(2)), **rate)
    assert runs.trained(tmp_path, **rate).began == 6


def test_checkpoints_that_were_left_behind_twice_are_kept_twice(tmp_path: Path) -> None:
    runs.trained(tmp_path, output_keep=3)
    start = tmp_path / "four"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000004", start)
    for _ in range(2):
        runs.trained(tmp_path, Options(start=start, stop=stopping_after(2)), output_keep=3)
        runs.trained(tmp_path, output_keep=3)
    runs.trained(tmp_path, Options(start=start, stop=stopping_after(1)), output_keep=3)
    assert [name for name in names(tmp_path) if "12.left" in name] == [
        "step-00000012.left",
        "step-00000012.left-2",
        "step-00000012.left-3",
    ]


@pytest.mark.parametrize("tokens", ["characters", "uint8"])
def test_a_change_in_the_middle_of_a_long_text_is_a_change(tmp_path: Path, tokens: str) -> None:
    text = "abcdefgh" * 400_000
    (tmp_path / "text.txt").write_text(text)
    kind = {"data_tokens": tokens, "data_vocabulary": 200} if tokens == "uint8" else {}
    changes: dict[str, Any] = {"training_steps": 2, **kind}
    runs.trained(tmp_path, **changes)
    assert runs.trained(tmp_path, **changes).began == 2
    (tmp_path / "text.txt").write_text(text[:1_600_000] + "h" + text[1_600_001:])
    with pytest.raises(ConfigError, match="the text or the tokens differ"):
        runs.trained(tmp_path, **changes)


def test_another_grid_is_a_change(tmp_path: Path) -> None:
    runs.trained(tmp_path, training_steps=2, model_exact=True)
    with pytest.raises(ConfigError, match=r"model.grid_bits: None → 12"):
        runs.trained(tmp_path, training_steps=2, model_exact=True, model_grid_bits=12)


def test_infinite_weights_are_not_saved(tmp_path: Path) -> None:
    """The loss and the gradients of that step are those of the weights before it, which were finite."""
    with pytest.raises(TrainingError, match=r"The update of step 1 made .* more weights NaN or infinite"):
        runs.trained(tmp_path, output_save_every=1, training_weight_decay=1e38, training_learning_rate=1e3)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training_seed", 2**63),
        ("training_threads", 10**7),
        ("training_learning_rate", float("inf")),
        ("training_weight_decay", float("inf")),
    ],
)
def test_an_impossible_number_is_refused(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key.replace("_", ".", 1)):
        runs.config(tmp_path, **{key: value})


def test_sizes_that_no_machine_has_memory_for_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"A model of width 16 and depth 2 needs .* for itself"):
        runs.trained(tmp_path, model_hidden=2**55)
    with pytest.raises(ConfigError, match=r"training\.batch = 100000000000000000 .* needs .* for itself"):
        runs.trained(tmp_path, training_batch=10**17)


def test_an_invalid_pattern_of_files_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'data\.files = "/a.txt" is not a pattern'):
        runs.trained(tmp_path, data_path=str(tmp_path), data_files="/a.txt")


def test_a_value_instead_of_a_table_is_explained_even_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("training = 5\n")
    with pytest.raises(ConfigError, match=r"training = 5 is a value; write a table, \[training\]"):
        read_config(tmp_path / "a.toml", {"training.steps": 3})


def test_a_folder_without_a_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_model(tmp_path)
