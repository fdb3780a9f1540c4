"""The configuration of a training run: a TOML file, read and checked before anything else happens."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from retrograde.memory import MODES
from retrograde.network.choices import check_choice


class ConfigError(Exception):
    """A configuration that cannot be used; the message says in a sentence why, and what to write."""


_LARGEST = 2**63 - 1
_LARGEST_FILE = 1 << 24  # bytes of a configuration
MOST_BATCHES = 100_000  # of an evaluation, during which nothing else happens
MOST_BLOCKS = 65_536  # which take a minute to be built
MOST_THREADS = 1024  # the system silently kills a process that asks for far more than it has


@dataclass(frozen=True)
class ModelConfig:
    """`retrograde.models.ReversibleLM`."""

    width: int = 128
    depth: int = 12
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    dropout: float = 0.0
    memory: str = "reverse"
    exact: bool = False
    grid_bits: int | None = None

    def check(self) -> None:
        _at_least(self, 1, "width", "depth", "heads", "kv_heads", "hidden")
        if self.depth > MOST_BLOCKS:
            raise ConfigError(f"model.depth = {self.depth} is more than the maximum of {MOST_BLOCKS}.")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model.width = {self.width} cannot be shared by model.heads = {self.heads} heads of an even width; "
                f"give a multiple of {2 * self.heads}."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}.")
        _check_choice("model.memory", self.memory, MODES)
        if self.grid_bits is not None and not self.exact:
            raise ConfigError(f"model.grid_bits = {self.grid_bits} is for exact streams: set model.exact = true too.")
        if self.grid_bits is not None and not 1 <= self.grid_bits <= 22:
            raise ConfigError(f"model.grid_bits = {self.grid_bits} is not a number of bits from 1 to 22.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout = {self.dropout} is not a fraction from 0 up to, but not including, 1.")


@dataclass(frozen=True)
class DataConfig:
    """A text file, a folder of text files, or a file of tokens (`.bin`), which is memory-mapped."""

    path: str = ""
    tokens: Literal["characters", "bytes", "uint8", "uint16", "int32"] = "characters"
    vocabulary: int | None = None
    files: str = "*.txt"
    length: int = 128
    validation: float = 0.05

    @property
    def is_tokens(self) -> bool:
        return self.tokens in ("uint8", "uint16", "int32")

    def check(self) -> None:
        if not self.path:
            raise ConfigError(
                'data.path is missing: name a text file, a folder or a file of tokens, as in path = "a.txt".'
            )
        _at_least(self, 1, "length", "vocabulary")
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"data.validation = {self.validation} is not a fraction from 0 up to, but not including, 1."
            )
        if self.is_tokens and self.vocabulary is None:
            raise ConfigError(f'data.tokens = "{self.tokens}" needs data.vocabulary, the number of different tokens.')
        if not self.is_tokens and self.vocabulary is not None:
            raise ConfigError(
                f'data.vocabulary is for files of tokens; with data.tokens = "{self.tokens}" it follows from the text.'
            )


@dataclass(frozen=True)
class TrainingConfig:
    """AdamW, its schedule, and how a step is computed. `batch` is over all processes and accumulated parts."""

    steps: int = 1000
    batch: int = 16
    accumulate: int = 1
    learning_rate: float = 1e-3
    final_rate: float = 0.1
    warmup: int = 50
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    device: str = "auto"
    threads: int = 0
    seed: int = 0

    def check(self) -> None:
        _at_least(self, 1, "steps", "batch", "accumulate")
        _at_least(self, 0, "warmup", "threads", "weight_decay", "clip", "seed")
        if self.batch % self.accumulate:
            raise ConfigError(
                f"training.batch = {self.batch} cannot be cut into training.accumulate = {self.accumulate} equal parts."
            )
        if not self.learning_rate > 0:
            raise ConfigError(f"training.learning_rate = {self.learning_rate} is not above 0.")
        for name in ("learning_rate", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"training.{name} = {getattr(self, name)} is not a finite number.")
        for name, most in (("seed", 2**63 - 1), ("threads", MOST_THREADS)):
            if getattr(self, name) > most:
                raise ConfigError(f"training.{name} = {getattr(self, name)} is more than the maximum of {most}.")
        if not 0 <= self.final_rate <= 1:
            raise ConfigError(
                f"training.final_rate = {self.final_rate} is not a fraction of the learning rate, 0 to 1."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"training.betas = {list(self.betas)}: each is from 0 up to, but not including, 1.")


@dataclass(frozen=True)
class EvaluationConfig:
    """How often the loss on unseen text is measured, and on how many batches. 0 means never."""

    every: int = 100
    batches: int = 8

    def check(self) -> None:
        _at_least(self, 0, "every")
        _at_least(self, 1, "batches")
        if self.batches > MOST_BATCHES:
            raise ConfigError(f"evaluation.batches = {self.batches} is more than the maximum of {MOST_BATCHES}.")


@dataclass(frozen=True)
class OutputConfig:
    """Where log and checkpoints are written, how often, how many checkpoints are kept, and what else shows the log."""

    folder: str = "run"
    save_every: int = 100
    keep: int = 3
    log_every: int = 10
    tracker: Literal["none", "wandb", "trackio"] = "none"

    def check(self) -> None:
        _at_least(self, 1, "save_every", "keep", "log_every")
        if not self.folder:
            raise ConfigError("output.folder is empty: name the folder for log and checkpoints.")


@dataclass(frozen=True)
class Config:
    """The whole configuration, one field per table of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The configuration as plain values, for JSON and TOML."""
        tables = dataclasses.asdict(self)
        tables["training"]["betas"] = list(self.training.betas)
        return tables


# What may differ between a checkpoint and the configuration that resumes from it: it does not change what is computed.
FREE = {
    "model.memory", "data.path", "data.files", "training.parallel", "training.device", "training.threads",
    "training.accumulate", "training.compile",
    *(f"evaluation.{f.name}" for f in dataclasses.fields(EvaluationConfig)),
    *(f"output.{f.name}" for f in dataclasses.fields(OutputConfig)),
}  # fmt: skip


def changes(before: Mapping[str, Mapping[str, Any]], now: Config) -> list[str]:
    """What changes the computation, as `table.key: old → new`."""
    return [
        f"{table}.{key}: {old!r} → {value!r}"
        for table, values in now.to_dict().items()
        for key, value in values.items()
        if (old := before.get(table, {}).get(key)) != value and f"{table}.{key}" not in FREE
    ]


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration in a TOML file. Relative paths in it are relative to its folder.

    Args:
        overrides: values by `table.key`, which take precedence over those of the file.
    """
    tables = _parsed(path)
    for name, value in (overrides or {}).items():
        table, _, key = name.partition(".")
        values = tables.setdefault(table, {})
        if isinstance(values, dict):  # otherwise config_of refuses it
            values[key] = value
    config = config_of(tables, where=str(path))
    here = path.parent
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=str(here / config.data.path)),
        output=dataclasses.replace(config.output, folder=str(here / config.output.folder)),
    )


def parse_value(text: str) -> Any:
    """A value in TOML's notation; anything else is taken as text."""
    try:
        return _toml().loads(f"value = {text}")["value"]
    except RecursionError:
        raise ConfigError("A value given with --set is nested too deeply: no setting is.") from None
    except ValueError:
        return text


def config_of(tables: Mapping[str, Any], *, where: str = "The configuration") -> Config:
    """The configuration made of plain values, checked."""
    parts: dict[str, Any] = {}
    kinds = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for name, values in tables.items():
        if name not in kinds:
            raise ConfigError(f"{where}: there is no table [{name}]. The tables are {', '.join(kinds)}.")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: {name} = {values!r} is a value; write a table, [{name}].")
        parts[name] = _part(kinds[name], name, values, where)
    config = Config(**parts)
    for table in (config.model, config.data, config.training, config.evaluation, config.output):
        table.check()
    if config.training.warmup > config.training.steps:
        raise ConfigError(
            f"training.warmup = {config.training.warmup} is longer than training.steps = {config.training.steps}."
        )
    return config


def _part(kind: Any, table: str, values: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ConfigError(f"{where}: [{table}] has no {', '.join(unknown)}. It has {', '.join(hints)}.")
    return kind(**{key: _fitted(f"{table}.{key}", value, hints[key]) for key, value in values.items()})


def _fitted(name: str, value: Any, hint: Any) -> Any:
    """The value in the type of its field, or an error that says what the field takes."""
    if get_origin(hint) is Literal:
        _check_choice(name, value, get_args(hint))
        return value
    if get_origin(hint) is types.UnionType:  # of a plain type and None, which TOML cannot write
        return None if value is None else _fitted(name, value, get_args(hint)[0])
    if get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(get_args(hint)):
            raise ConfigError(f"{name} = {value!r} must be a list of {len(get_args(hint))} numbers.")
        return tuple(_fitted(name, v, kind) for v, kind in zip(value, get_args(hint), strict=True))
    if type(value) is int and abs(value) > _LARGEST:
        raise ConfigError(f"{name} has {len(str(abs(value)))} digits: no setting is so large.")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name} = {value!r} contains a NUL character, which no name or path can.")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        wanted = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}[hint]
        raise ConfigError(f"{name} = {value!r} must be {wanted}.")
    return value


def _check_choice(name: str, value: Any, choices: Iterable[object]) -> None:
    try:
        check_choice(name, value, choices)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _at_least(part: Any, least: int, *names: str) -> None:
    table = type(part).__name__.removesuffix("Config").lower()
    for name in names:
        value = getattr(part, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{table}.{name} = {value} must be {least} or more.")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ConfigError(f"{path} has more than {_LARGEST_FILE:,} bytes, so that it cannot be a configuration.")
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8.") from None
    toml = _toml()
    try:
        return dict(toml.loads(text))
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a configuration.") from None
    except ValueError as error:  # of its syntax, or a number of thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}.") from None


def _toml() -> Any:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ConfigError(f"Python 3.10 reads TOML with {name}: pip install 'retrograde[train]'.") from None
