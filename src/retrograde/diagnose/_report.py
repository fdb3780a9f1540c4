"""The result of an examination: a tree of frozen dataclasses, which writes itself as a table, a picture or JSON."""

from __future__ import annotations

import json
import math
import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from retrograde.measure.formatting import format_bytes, format_error

from ._compare import worst


class ExaminationError(ValueError):
    """A model that cannot be examined; the message says in a sentence why, and what to do."""


@dataclass(frozen=True)
class Behaviour:
    """What a branch does that a replay must handle. The engine handles all of it but the last two.

    Attributes:
        draws: the generators that it draws from.
        generators: the generators that it owns.
        buffers: the buffers that it changes.
        attributes: the plain attributes, outside of buffers, that it changes.
        edits_source: whether it edits what it reads, in place; a stack refuses to run it.
        repeat_error: how far, relatively, a second run from the same state is from the first; 0 for the same bits.
    """

    draws: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    edits_source: bool = False
    repeat_error: float = 0.0

    def sentences(self) -> list[str]:
        """In words; empty for a branch that is a plain function of what it reads."""
        lists = [("draws from", self.draws), ("owns", self.generators), ("changes the buffers", self.buffers)]
        lists.append(("changes the attributes", self.attributes))
        sentences = [f"{verb} {', '.join(names)}" for verb, names in lists if names]
        if self.edits_source:
            sentences.append(
                "edits its source in place, which a stack refuses: use an out-of-place operation (relu(x) for "
                "relu_(x)), or let the branch clone its source"
            )
        if self.repeat_error:
            sentences.append(f"repeats its result only up to an error of {self.repeat_error:.1e}")
        return sentences


@dataclass(frozen=True)
class StepReport:
    """One step. Figures are None where a step was not recomputed, or has no gradient.

    Attributes:
        drift: the relative error of what the branch reads, as the backward pass recomputed it.
        gradient_error: the relative error of its parameters' gradients, against stored activations.
        gradient_cosine: the cosine between the two.
        decisions: how many indices its branch chose (top-k, argmax, sort …).
        flips: how many of them the replay chose differently.
        prevented_flips: how many more it would have, without `retrograde.decide`.
    """

    name: str
    target: str
    coupling: str
    drift: float | None
    gradient_error: float | None
    gradient_cosine: float | None
    decisions: int
    flips: int
    prevented_flips: int
    behaviour: Behaviour


@dataclass(frozen=True)
class BlockReport:
    """One block; the gradients' figures as in its steps.

    Attributes:
        drift: the relative error of the streams before this block, as the backward pass recomputed them.
        memory: its memory mode in the run that was examined.
        amplification: by how much the inverse of this block magnifies a small relative error of the streams.
        magnitude: the root mean square of the streams that enter it.
        peak_bytes: for each memory mode the most bytes alive while the run was at this block.
    """

    index: int
    name: str
    memory: str
    drift: float | None
    amplification: float | None
    magnitude: float | None
    gradient_error: float | None
    gradient_cosine: float | None
    peak_bytes: dict[str, int]
    steps: tuple[StepReport, ...]

    @property
    def decisions(self) -> int:
        return sum(step.decisions for step in self.steps)

    @property
    def flips(self) -> int:
        return sum(step.flips for step in self.steps)

    @property
    def error(self) -> float:
        """The larger of drift and gradient error."""
        return worst((self.drift, self.gradient_error)) or 0.0


@dataclass(frozen=True)
class StackReport:
    """One ReversibleSequence.

    Attributes:
        floor: the relative spacing of numbers of this dtype.
        tolerance: the error up to which its blocks count as healthy: the given one, or the floor if that is greater.
        input_gradient_error: the relative error of the gradient that leaves the stack.
        first_bad: of the blocks past the tolerance, the one that the backward pass meets first.
        memory: the mode that was examined, in which blocks are reversed; blocks may have others beside it.
    """

    name: str
    dtype: str
    floor: float
    tolerance: float
    calls: int
    input_gradient_error: float | None
    first_bad: int | None
    blocks: tuple[BlockReport, ...]
    memory: str = "reverse"

    @property
    def drift(self) -> float:
        return worst(b.drift for b in self.blocks) or 0.0

    @property
    def gradient_error(self) -> float:
        """The worst of any block, and of the gradient that leaves the stack."""
        return worst([*(b.gradient_error for b in self.blocks), self.input_gradient_error]) or 0.0

    @property
    def flips(self) -> int:
        return sum(block.flips for block in self.blocks)

    @property
    def edits(self) -> list[tuple[int, str]]:
        """The blocks and branches that edit their source in place."""
        return [
            (block.index, step.name) for block in self.blocks for step in block.steps if step.behaviour.edits_source
        ]

    @property
    def past(self) -> list[BlockReport]:
        """The blocks past the tolerance."""
        return [b for b in self.blocks if not b.error <= self.tolerance]


@dataclass(frozen=True)
class Peak:
    """The most live bytes in one training step, besides parameters, their gradients and the batch, and where."""

    memory: str
    bytes: int
    where: str


@dataclass(frozen=True)
class Figures:
    """What a remedy is judged by: the worst drift and gradient error of any block, flips, and the peak in bytes."""

    drift: float
    gradient_error: float
    flips: int
    peak_bytes: int


@dataclass(frozen=True)
class Suggestion:
    """A remedy that was tried, with what it changed. `enough` says whether every block came within the tolerance."""

    remedy: str
    how: str
    before: Figures
    after: Figures
    enough: bool

    def sentence(self) -> str:
        before, after = self.before, self.after
        effects = [
            f"drift {format_error(before.drift)} → {format_error(after.drift)}",
            f"gradient error {format_error(before.gradient_error)} → {format_error(after.gradient_error)}",
        ]
        if before.flips or after.flips:
            effects.append(f"flips {before.flips} → {after.flips}")
        effects.append(f"peak {format_bytes(before.peak_bytes)} → {format_bytes(after.peak_bytes)}")
        return f"{self.remedy}: {', '.join(effects)}{'' if self.enough else ' (not enough by itself)'}. {self.how}"


@dataclass(frozen=True)
class Untried:
    """A remedy that the model does not run with, and why."""

    remedy: str
    reason: str

    def sentence(self) -> str:
        return f"{self.remedy}: could not be tried: {self.reason}"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`.

    Attributes:
        model: the model's class.
        tolerance: the relative error up to which a block counts as healthy; where a dtype is coarser, its floor is.
        verdict: the result in a sentence.
        stacks: every ReversibleSequence that the model called.
        peaks: the peak of the whole model in each memory mode.
        suggestions: what to change, each with its measured effect; what helps most comes first.
        untried: remedies that the model does not run with.
    """

    model: str
    tolerance: float
    verdict: str
    stacks: tuple[StackReport, ...]
    peaks: tuple[Peak, ...]
    suggestions: tuple[Suggestion, ...]
    untried: tuple[Untried, ...] = ()

    @property
    def healthy(self) -> bool:
        return all(stack.first_bad is None and not stack.edits for stack in self.stacks)

    def table(self) -> str:
        """Everything as plain text."""
        from ._table import text_of

        return text_of(self)

    def plot(self, path: str | Path) -> Path:
        """Write a picture: drift and gradient error block by block, the peak memory below. Needs matplotlib."""
        from ._plot import draw

        return draw(self, Path(path))

    def to_json(self, *, indent: int | None = 2) -> str:
        """As JSON; numbers that JSON has no word for (infinity) are strings."""
        return json.dumps(_plain(asdict(self)) | {"healthy": self.healthy}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """The diagnosis that `to_json` wrote."""
        diagnosis: Diagnosis = _built(cls, json.loads(text))
        return diagnosis


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _built(kind: Any, value: Any) -> Any:
    """A value of JSON as the type that a dataclass's field declares."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _built(next(k for k in inner if k is not type(None)), value)
    if origin is tuple:
        return tuple(_built(inner[0], v) for v in value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: _built(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value})
    return float(value) if kind is float else value
