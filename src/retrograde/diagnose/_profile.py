"""`profile`: live memory over a training step, in each memory mode, and what is in it at its peak."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from retrograde.measure.loss import Loss
from retrograde.measure.memory_tracker import Holding, holdings
from retrograde.memory import Mode, mode_named

from ._bench import Bench, Course, Setup
from ._examine import check_called, in_words

DEFAULT_MODES: tuple[Mode, ...] = ("store", "checkpoint", "reverse")
KINDS = ("before the blocks", "saved by the blocks", "after the blocks", "a block's own step")
BEFORE, SAVED, AFTER, OWN = KINDS


@dataclass(frozen=True)
class Part:
    """Bytes that are alive at the peak: of which kind, made where, and by which operators, the largest first."""

    kind: str
    bytes: int
    made: str
    operators: tuple[str, ...]


@dataclass(frozen=True)
class BlockMemory:
    """Of one block: what its forward pass saved, and the most bytes alive while its backward pass ran."""

    name: str
    saved: int
    peak: int


@dataclass(frozen=True)
class ModeProfile:
    """A training step in one memory mode. Parameters, their gradients and the batch do not count.

    `timeline` has the live bytes of each of `KINDS` after each change, in order; `turn` is where the backward pass
    starts in it, `top` where the peak is; `needs_inverse` says whether the mode inverts blocks.
    """

    memory: str
    peak: int
    where: str
    parts: tuple[Part, ...]
    blocks: tuple[BlockMemory, ...]
    turn: int
    top: int
    needs_inverse: bool
    timeline: list[tuple[int, ...]] = field(repr=False)

    def bytes_of(self, *kinds: str) -> int:
        """The bytes of some kinds at the peak."""
        return sum(part.bytes for part in self.parts if part.kind in kinds)


@dataclass(frozen=True)
class Profile:
    """The profile of a model in each memory mode, with a sentence and what to do for each."""

    model: str
    modes: tuple[ModeProfile, ...]
    sentences: dict[str, str]
    advice: dict[str, str]

    def table(self) -> str:
        """The figures as text."""
        from ._profile_text import table

        return table(self)

    def to_json(self) -> str:
        """Everything but the timelines."""
        figures = asdict(self)
        for mode in figures["modes"]:
            del mode["timeline"]
        return json.dumps(figures, indent=2)

    def plot(self, path: Path | str) -> Path:
        """Write the picture. Needs matplotlib."""
        from ._profile_plot import draw

        return draw(self, Path(path))

    def html(self, path: Path | str) -> Path:
        """Write a page with picture, sentences and tables, in one file. Needs matplotlib."""
        from ._profile_plot import page

        return page(self, Path(path))


def profile(
    model: nn.Module, batch: Any, *, modes: Sequence[Mode] = DEFAULT_MODES, loss: Loss | None = None
) -> Profile:
    """Measure the live memory over the course of a training step, in each memory mode.

    The model is left unchanged.

    Args:
        model: a module that calls one or more `ReversibleSequence`s.
        batch: what to call it with: a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        modes: the memory modes to run it in; blocks without an inverse get the mode's fallback.
        loss: makes a scalar of the model's output; by default the output's own `loss`, or the mean squared distance
            of its tensors from fixed random numbers.

    Raises:
        ExaminationError: if there is no stack, or the model does not run; the message says why.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.diagnose import profile
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(6)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> memory = profile(stack, torch.randn(64, 8))
        >>> [mode.memory for mode in memory.modes], memory.modes[0].peak > memory.modes[2].peak
        (['store', 'checkpoint', 'reverse'], True)
    """
    from ._profile_text import explain

    bench = Bench(model, batch, loss)
    with in_words("The model"):
        _, logs = bench.gradients(Setup(bench.plans("store")))  # what is allocated once and for all is there then
        check_called(logs)
        measured = tuple(_measured(bench, mode) for mode in modes)
    explained = {mode.memory: explain(mode, measured, bench.output) for mode in measured}
    sentences, advice = ({memory: pair[i] for memory, pair in explained.items()} for i in (0, 1))
    return Profile(type(model).__name__, measured, sentences, advice)


def _measured(bench: Bench, memory: Mode) -> ModeProfile:
    mode, setup = mode_named(memory), Setup(bench.plans(memory))
    bench.gradients(setup)  # a mode may save more the first time than later
    course = bench.track(setup)
    made: dict[int, str] = {}
    totals = dict.fromkeys(KINDS, 0)
    timeline: list[tuple[int, ...]] = []
    for event in course:
        totals[_kind(made.setdefault(event.storage, event.phase))] += event.change
        timeline.append(tuple(totals.values()))
    top = max(range(len(course)), key=lambda i: course[i].live, default=0)
    peak, where = (course[top].live, course[top].phase) if course else (0, "nowhere")
    parts, blocks = _parts(holdings(course)), _blocks(course, bench)
    return ModeProfile(mode.name, peak, where, parts, blocks, course.turn, top, mode.needs_inverse, timeline)


def _kind(place: str) -> str:
    if "block " in place:
        return SAVED if place.startswith("forward") else OWN
    return BEFORE if "before" in place else AFTER


def _parts(alive: Sequence[Holding]) -> tuple[Part, ...]:
    """What is alive, by where it was made; what blocks save is put together."""
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for size, operator, place in alive:
        kind = _kind(place)
        operators = groups.setdefault((kind, "forward, all blocks" if kind == SAVED else place), {})
        operators[operator] = operators.get(operator, 0) + size
    parts = []
    for (kind, place), operators in groups.items():
        largest = sorted(operators, key=lambda name: -operators[name])
        names = tuple(name.removeprefix("aten.").partition(".")[0] for name in largest[:3])
        parts.append(Part(kind, sum(operators.values()), place, names))
    return tuple(sorted(parts, key=lambda part: -part.bytes))


def _blocks(course: Course, bench: Bench) -> tuple[BlockMemory, ...]:
    saved: dict[str, int] = {}
    for size, _, place in holdings(course[: course.turn], "end"):
        saved[place] = saved.get(place, 0) + size
    peaks = course.peaks()
    labels = [f"{bench.label(name)}block {i}" for name, stack in bench.stacks.items() for i in range(len(stack))]
    return tuple(BlockMemory(b, saved.get(f"forward, {b}", 0), peaks.get(f"backward, {b}", 0)) for b in labels)
