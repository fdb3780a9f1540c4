"""The training data: text, folders of text, files of tokens; and batches that depend only on seed and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrograde.training import ConfigError
from retrograde.training._config import DataConfig
from retrograde.training._data import read_corpus


def corpus(path: Path, **values: Any) -> Any:
    return read_corpus(DataConfig(path=str(path), **{"length": 4, "validation": 0.0, **values}))


def test_characters_and_bytes_decode_to_the_text(tmp_path: Path) -> None:
    text = "Größe: 5 µm, and more of it."
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for tokens in ("characters", "bytes"):
        data = corpus(tmp_path / "a.txt", tokens=tokens)
        assert data.vocabulary.decode(data.seen) == text
        assert data.vocabulary.decode(data.vocabulary.encode("more")) == "more"
        assert data.vocabulary.size == (256 if tokens == "bytes" else len(set(text)))


def test_a_folder_is_read_at_any_depth_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("b/one.txt", "second"), ("a.txt", "first"), ("b/note.md", "hidden")):
        (tmp_path / name).write_text(text)
    data = corpus(tmp_path)
    assert data.vocabulary.decode(data.seen) == "first\nsecond"
    data = corpus(tmp_path, files="*.md")
    assert data.vocabulary.decode(data.seen) == "hidden"


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int32"])
def test_a_file_of_tokens_is_memory_mapped(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens.bin"
    values = np.arange(200, dtype=kind)
    values.tofile(path)
    data = corpus(path, tokens=kind, vocabulary=200)
    assert data.batch(0, 1, 3).dtype == torch.int64
    assert torch.equal(data.seen.long(), torch.arange(200))
    with path.open("r+b") as file:  # a mapped tensor shows the change
        file.write(values[7:8].tobytes())
    assert int(data.seen[:1].long()) == 7


def test_a_batch_depends_only_on_the_seed_and_the_step(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 9)
    one, other = corpus(tmp_path / "a.txt"), corpus(tmp_path / "a.txt")
    for step in (1, 2, 3):
        other.batch(0, step, 5)
    torch.manual_seed(9)
    assert torch.equal(one.batch(0, 3, 5), other.batch(0, 3, 5))
    assert not torch.equal(one.batch(0, 3, 5), one.batch(0, 4, 5))
    assert not torch.equal(one.batch(0, 3, 5), one.batch(1, 3, 5))
    rows = one.batch(0, 3, 5)
    assert torch.equal((rows[:, 1:] - rows[:, :-1]) % 26, torch.ones(5, 4, dtype=torch.int64)), "texts are contiguous"


def test_unseen_text_is_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 90 + "b" * 10)
    data = corpus(tmp_path / "a.txt", validation=0.1)
    assert all(data.batch(0, step, 8).max() == 0 for step in range(20))
    assert data.unseen_batch(0, 8).min() == 1


@pytest.mark.parametrize(
    ("name", "data", "values", "words"),
    [
        ("none.txt", None, {}, "No such file"),
        ("none.bin", None, {"tokens": "uint16", "vocabulary": 9}, "No such file"),
        ("a.txt", b"", {}, "is empty"),
        ("a.txt", b"abc", {}, "has 3 tokens, 3 of them to train on: too few"),
        ("a.txt", b"abc" * 9, {"validation": 0.1}, "2 of them to evaluate on: too few"),
        ("a.txt", b"ab\xff", {}, "is not text in UTF-8 (byte 2)"),
        ("a.bin", b"abc", {"tokens": "uint16", "vocabulary": 9}, "has 3 bytes, which is not a number of tokens"),
        ("a.bin", bytes([1, 9] * 9), {"tokens": "uint8", "vocabulary": 9}, "has token 9, outside of data.vocabulary"),
        ("a.bin", b"\xff" * 40, {"tokens": "int32", "vocabulary": 9}, "has token -1, outside"),
        (".", None, {"files": "*.rst"}, 'matches data.files = "*.rst"'),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_explained(
    tmp_path: Path, name: str, data: bytes | None, values: dict[str, Any], words: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        corpus(tmp_path / name, **values)
    assert words in str(caught.value)
