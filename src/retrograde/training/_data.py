"""What a run trains on: batches of text or tokens. A batch depends only on the seed and the step's number."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ._config import ConfigError, DataConfig

_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32}
_PART = 1 << 20  # tokens that are read at once


@dataclass(frozen=True)
class Vocabulary:
    """Text to token numbers and back: the characters of the text, or bytes, or (for a file of tokens) neither."""

    size: int
    characters: str | None = None
    is_bytes: bool = False

    def encode(self, text: str) -> Tensor:
        """Token numbers of a text, `(length,)`."""
        if self.is_bytes:
            return torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)
        if self.characters is None:
            raise ValueError(
                "The model was trained on a file of tokens: encode text with the tokenizer that made the file."
            )
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise ValueError(f"The training text has no {unknown}; its characters are {self.characters!r}.")
        number = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([number[character] for character in text], dtype=torch.int32)

    def decode(self, tokens: Tensor) -> str:
        """The text of token numbers; bytes that are not UTF-8 become question marks."""
        if self.is_bytes:
            return bytes(tokens.tolist()).decode("utf-8", errors="replace")
        if self.characters is None:
            raise ValueError(
                "The model was trained on a file of tokens: decode them with the tokenizer that made the file."
            )
        return "".join(self.characters[i] for i in tokens.tolist())

    def to_dict(self) -> dict[str, Any]:
        return {"size": self.size, "characters": self.characters, "is_bytes": self.is_bytes}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Vocabulary:
        size, characters, is_bytes = values["size"], values["characters"], values["is_bytes"]
        kinds = (type(size) is int, isinstance(characters, (str, NoneType)), type(is_bytes) is bool)
        if not all(kinds) or size < 1:
            raise ValueError("its vocabulary is none")
        return cls(size, characters, is_bytes)


class Corpus:
    """A sequence of tokens: those to train on, followed by those to evaluate on.

    Attributes:
        vocabulary: what the tokens stand for.
        fingerprint: of the tokens, so that a run that resumes notices another text.
    """

    def __init__(self, tokens: Tensor, vocabulary: Vocabulary, config: DataConfig) -> None:
        self.vocabulary, self.length = vocabulary, config.length
        unseen = int(len(tokens) * config.validation)
        self.seen, self.unseen = tokens[: len(tokens) - unseen], tokens[len(tokens) - unseen :]
        self.fingerprint = _fingerprint(tokens)
        for name, part in (("train on", self.seen), ("evaluate on", self.unseen)):
            if len(part) <= self.length and (part is self.seen or unseen):
                raise ConfigError(
                    f"{config.path} has {len(tokens):,} tokens, {len(part):,} of them to {name}: too few for one text "
                    f"of data.length = {self.length} and the token after it. Give more text, a smaller length, "
                    "or another data.validation (0 for none)."
                )

    def batch(self, seed: int, step: int, size: int) -> Tensor:
        """The batch of a step, `(size, length + 1)`."""
        return self._drawn(self.seen, mixed(seed, "batch", step), size)

    def unseen_batch(self, number: int, size: int) -> Tensor:
        """A batch to evaluate on; the same number gives the same one."""
        return self._drawn(self.unseen, mixed("unseen", number), size)

    def _drawn(self, part: Tensor, seed: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(part) - self.length, (size,), generator=generator).tolist()
        return torch.stack([part[start : start + self.length + 1] for start in starts]).long()


def mixed(*parts: object) -> int:
    """One seed made of several parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")


def read_corpus(config: DataConfig) -> Corpus:
    """Read the text, or memory-map the file of tokens."""
    path = Path(config.path)
    try:
        if config.is_tokens:
            return Corpus(_mapped(path, config), Vocabulary(int(config.vocabulary or 0)), config)
        parts = _read(path, config)
    except OSError as error:
        raise ConfigError(f"data.path: {error.filename or path} cannot be read: {error.strerror}.") from None
    if not any(parts.values()):
        raise ConfigError(f"data.path: {config.path} is empty.")
    if config.tokens == "bytes":  # as they are in the file: no character set, no change of line ends
        tokens = torch.frombuffer(bytearray(b"\n".join(parts.values())), dtype=torch.uint8)
        return Corpus(tokens, Vocabulary(256, is_bytes=True), config)
    text = "\n".join(_decoded(file, part) for file, part in parts.items())
    characters = "".join(sorted(set(text)))
    vocabulary = Vocabulary(len(characters), characters)
    return Corpus(vocabulary.encode(text), vocabulary, config)


def _read(path: Path, config: DataConfig) -> dict[Path, bytes]:
    """The bytes of a file, or of all files below a folder in the order of their names."""
    files = [path]
    if path.is_dir():
        try:
            files = sorted(file for file in path.rglob(config.files) if file.is_file())
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f'data.files = "{config.files}" is not a pattern of file names: {error}. Write, for example, "*.txt".'
            ) from None
        if not files:
            raise ConfigError(f'data.path: no file below {path} matches data.files = "{config.files}".')
    elif path.exists() and not path.is_file():
        raise ConfigError(f"data.path: {path} is a device or a pipe; name a file or a folder of files.")
    return {file: file.read_bytes() for file in files}


def _decoded(file: Path, content: bytes) -> str:
    """Text, in which every end of a line is a newline."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path: {file} is not text in UTF-8 (byte {error.start}). For a file of token numbers, set "
            'data.tokens = "uint16" (or "uint8", "int32") and data.vocabulary.'
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _mapped(path: Path, config: DataConfig) -> Tensor:
    dtype, size = _DTYPES[config.tokens], path.stat().st_size
    if not path.is_file() or size == 0 or size % dtype.itemsize:
        raise ConfigError(
            f'data.path: {path} has {size} bytes, which is not a number of tokens of data.tokens = "{config.tokens}" '
            f"({dtype.itemsize} bytes each)."
        )
    tokens = torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype)
    most = max(int(part.to(torch.int32).max()) for part in tokens.split(_PART))
    least = min(int(part.to(torch.int32).min()) for part in tokens.split(_PART)) if config.tokens == "int32" else 0
    if most >= int(config.vocabulary or 0) or least < 0:
        wrong = most if least >= 0 else least
        raise ConfigError(f"data.path: {path} has token {wrong}, outside of data.vocabulary = {config.vocabulary}.")
    return tokens


def _fingerprint(tokens: Tensor) -> str:
    """A hash of all tokens, read where they are, without a copy: a change anywhere changes it."""
    digest = hashlib.sha256(f"{len(tokens)} {tokens.dtype}".encode())
    for part in tokens.split(_PART):
        digest.update((ctypes.c_char * part.nbytes).from_address(part.data_ptr()))
    return digest.hexdigest()[:32]
