"""`profile`: live memory over a step of training, in each memory mode, and what is in it at its peak."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrograde._plan import Memory

from ._bench import Bench, Loss, Setup
from ._examine import MODES as MODES
from ._examine import _check_called, _in_words
from ._memory import Event
from ._report import ExaminationError, in_bytes

KINDS = ("before the blocks", "kept by the blocks", "after the blocks", "a block's own step")
BEFORE, KEPT, AFTER, OWN = KINDS


@dataclass(frozen=True)
class Part:
    """Bytes that are alive at the peak: of which kind, made where, and by which operators, the largest first."""

    kind: str
    bytes: int
    made: str
    operators: tuple[str, ...]


@dataclass(frozen=True)
class BlockMemory:
    """Of one block: what its forward pass left alive, and the most that was alive while its backward pass ran."""

    name: str
    kept: int
    peak: int


@dataclass(frozen=True)
class ModeProfile:
    """A step of training in one memory mode. Parameters, their gradients and the batch do not count.

    `timeline` has the live bytes of each of `KINDS` after each change, in order; `turn` is where the backward pass
    starts in it, `top` where the peak is.
    """

    memory: str
    peak: int
    where: str
    parts: tuple[Part, ...]
    blocks: tuple[BlockMemory, ...]
    turn: int
    top: int
    timeline: list[tuple[int, ...]] = field(repr=False)

    def held(self, kind: str) -> int:
        return sum(part.bytes for part in self.parts if part.kind == kind)


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
        found = asdict(self)
        for mode in found["modes"]:
            del mode["timeline"]
        return json.dumps(found, indent=2)

    def plot(self, path: Path | str) -> Path:
        """Write the picture. Needs matplotlib."""
        from ._profile_plot import draw

        return draw(self, Path(path))

    def html(self, path: Path | str) -> Path:
        """Write a page with picture, sentences and tables, in one file. Needs matplotlib."""
        from ._profile_plot import page

        return page(self, Path(path))


def profile(
    model: nn.Module, *args: Any, loss: Loss | None = None, modes: Sequence[Memory] = MODES, **kwargs: Any
) -> Profile:
    """Measure the live memory of a step of training over its course, in each memory mode.

    The model is left as it was found.

    Args:
        model: a module that calls one or more `ReversibleSequence`s.
        args: what to call it with; and `kwargs`.
        loss: makes a scalar of the model's output; by default the mean squared distance from fixed random numbers.
        modes: the memory modes to run it in.

    Raises:
        ExaminationError: if there is no stack, or the model does not run; the message says why.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.diagnose import profile
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(6)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> found = profile(stack, torch.randn(64, 8))
        >>> [mode.memory for mode in found.modes], found.modes[0].peak > found.modes[2].peak
        (['store', 'checkpoint', 'reverse'], True)
    """
    from ._profile_text import explain

    if not isinstance(model, nn.Module):
        raise ExaminationError(f"A torch.nn.Module can be profiled, not a value of type {type(model).__name__}.")
    outputs: list[tuple[tuple[int, ...], int]] = []
    bench = Bench(model, args, kwargs, None)
    wanted = loss or bench.loss

    def noting(output: Any) -> Tensor:
        if isinstance(output, Tensor):
            outputs.append((tuple(output.shape), output.nbytes))
        return wanted(output)

    bench.loss = noting
    if not bench.stacks:
        raise ExaminationError(
            f"{type(model).__name__} contains no retrograde.ReversibleSequence, so that there are no blocks to profile."
        )
    with _in_words("The model"):
        _, logs = bench.gradients(Setup(bench.plans("store")))  # what is allocated once and for all is there then
        _check_called(logs)
        found = tuple(_measured(bench, memory) for memory in modes)
    told = {mode.memory: explain(mode, found, outputs[-1] if outputs else None) for mode in found}
    sentences, advice = ({memory: pair[i] for memory, pair in told.items()} for i in (0, 1))
    return Profile(type(model).__name__, found, sentences, advice)


class _Moment(NamedTuple):
    """An event, and where the run was."""

    event: Event
    place: str


class _Course(list[Event]):
    """Receives a tracker's events, each with the place that the run was at."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[_Moment] = []
        self.turn = 0
        self._at = "forward, before the stack"

    def go(self, place: str) -> None:
        if place.startswith("backward") and not self.turn:
            self.turn = len(self.moments)
        self._at = place

    def append(self, event: Event) -> None:
        self.moments.append(_Moment(event, self._at))


def _measured(bench: Bench, memory: Memory) -> ModeProfile:
    course = _Course()
    setup = Setup(bench.plans(memory))
    bench.gradients(setup)  # a mode may keep more the first time than later
    bench.track(setup, course, course.go)
    return _summed(memory, course, bench)


def _summed(memory: str, course: _Course, bench: Bench) -> ModeProfile:
    made: dict[int, str] = {}
    totals = dict.fromkeys(KINDS, 0)
    timeline: list[tuple[int, ...]] = []
    for event, place in course.moments:
        totals[_kind(made.setdefault(event.storage, place))] += event.change
        timeline.append(tuple(totals.values()))
    top = max(range(len(timeline)), key=lambda i: course.moments[i].event.live, default=0)
    peak, where = (course.moments[top].event.live, course.moments[top].place) if timeline else (0, "nowhere")
    parts = _parts(course.moments[: top + 1], made)
    blocks = _blocks(course, made, bench)
    return ModeProfile(memory, peak, where, parts, blocks, course.turn, top, timeline)


def _kind(place: str) -> str:
    if "block " in place:
        return KEPT if place.startswith("forward") else OWN
    return BEFORE if "before" in place else AFTER


def _alive(moments: Sequence[_Moment]) -> dict[int, list[Any]]:
    """The storages that are alive after these events: bytes and operator."""
    alive: dict[int, list[Any]] = {}
    for event, _ in moments:
        held = alive.setdefault(event.storage, [0, event.operator])
        held[0] += event.change
        if not held[0]:
            del alive[event.storage]
    return alive


def _parts(moments: Sequence[_Moment], made: dict[int, str]) -> tuple[Part, ...]:
    """What is alive after these events, by where it was made; what blocks keep is put together."""
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for storage, (size, operator) in _alive(moments).items():
        kind = _kind(made[storage])
        operators = groups.setdefault((kind, "" if kind == KEPT else made[storage]), {})
        operators[operator] = operators.get(operator, 0) + size
    parts = []
    for (kind, place), operators in groups.items():
        largest = sorted(operators, key=lambda name: -operators[name])
        names = tuple(name.removeprefix("aten.").partition(".")[0] for name in largest[:3])
        parts.append(Part(kind, sum(operators.values()), place or "forward, all blocks", names))
    return tuple(sorted(parts, key=lambda part: -part.bytes))


def _blocks(course: _Course, made: dict[int, str], bench: Bench) -> tuple[BlockMemory, ...]:
    kept: dict[str, int] = {}
    for storage, (size, _) in _alive(course.moments[: course.turn]).items():
        kept[made[storage]] = kept.get(made[storage], 0) + size
    peaks: dict[str, int] = {}
    for event, place in course.moments:
        peaks[place] = max(peaks.get(place, 0), event.live)
    found = []
    for name, stack in bench.stacks.items():
        for i in range(len(stack.blocks)):
            label = f"{bench.label(name)}block {i}"
            found.append(BlockMemory(label, kept.get(f"forward, {label}", 0), peaks.get(f"backward, {label}", 0)))
    return tuple(found)


def of_peak(mode: ModeProfile, kind: str) -> str:
    return f"{in_bytes(mode.held(kind))} of {in_bytes(mode.peak)}"
