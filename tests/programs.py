"""Programs, drawn at random: any stack that the library allows, as plain data, and the branches of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from retrograde.couplings import Additive, Affine, Coupling, Replace, Scaled

BATCH, HIDDEN = 2, 5
SHAPES = ((3,), (4,), (2, 3), (3, 2), (2, 2, 2))
CONTEXT = ("shift", "gain")


class Gate(Coupling):
    """A coupling of a user's own, with nothing but the two methods: the update scales the target."""

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target * (1.25 + 0.25 * torch.tanh(update))

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined / (1.25 + 0.25 * torch.tanh(update))


Parts = Literal["one", "pair", "doubled"]


@dataclass(frozen=True)
class Kind:
    """A coupling: as the library has it, as a formula, and in which form its branch returns the update."""

    coupling: Any
    formula: Callable[..., Tensor]
    parts: Parts = "one"


KINDS: dict[str, Kind] = {
    "default": Kind(None, lambda x, u: x + u),
    "additive": Kind(Additive(), lambda x, u: x + u),
    "momentum": Kind(Scaled(keep=0.8, scale=0.2), lambda x, u: 0.8 * x + 0.2 * u),
    "half": Kind(Scaled(scale=0.5), lambda x, u: x + 0.5 * u),
    "affine": Kind(Affine(), lambda x, s, t: x * torch.exp(s) + t, "pair"),
    "limited": Kind(Affine(limit=0.3), lambda x, s, t: x * torch.exp(0.3 * torch.tanh(s / 0.3)) + t, "doubled"),
    "gate": Kind(Gate(), lambda x, u: x * (1.25 + 0.25 * torch.tanh(u))),
    "replace": Kind(Replace(), lambda x, u: u),
}
INVERTIBLE = tuple(name for name in KINDS if name != "replace")

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepSpec:
    target: int
    sources: tuple[int, ...]
    kind: str
    reads: Literal["each", "sum"]
    inputs: tuple[Shape, ...]
    """The shapes that the branch reads."""
    output: Shape
    takes: Any
    routes: Mapping[str, str]
    """What `takes` means: the branch's parameters, and the context that each receives."""
    dropout: float
    aux: bool
    frozen: bool


@dataclass(frozen=True, eq=False)
class BlockSpec:
    steps: tuple[StepSpec, ...]
    """One that stands there twice is the same module twice."""
    order: tuple[int, ...] | None

    @property
    def invertible(self) -> bool:
        return all(step.kind != "replace" for step in self.steps)


@dataclass(frozen=True)
class Program:
    seed: int
    dtype: torch.dtype
    names: tuple[Any, ...]
    shapes: tuple[Shape, ...]
    inputs: tuple[int, ...]
    """Which tensor enters each stream: two streams may start as the same one."""
    strided: bool
    input_grads: tuple[bool, ...]
    context: Mapping[str, bool]
    """The names of the context, and whether each requires grad."""
    blocks: tuple[BlockSpec, ...]
    """In the order in which they run; one that stands there twice is the same module twice."""
    memory: tuple[str, ...]
    anchors: frozenset[int]
    hidden: tuple[int, ...]
    """The blocks whose streams the loss reads too."""
    used: tuple[int, ...]
    """The outputs that the loss reads."""
    passes: Literal["once", "twice", "apart"]
    """One backward pass, two over the same graph, or one below a hidden state and then another above it."""

    @property
    def invertible(self) -> bool:
        return all(block.invertible for block in self.blocks)

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == torch.float64 else 2e-5


class Branch(nn.Module):
    """Reads every source, adds and multiplies by the context it is given, and returns what the coupling takes."""

    def __init__(self, spec: StepSpec) -> None:
        super().__init__()
        self.parts, self.shape, self.aux = KINDS[spec.kind].parts, spec.output, spec.aux
        self.read = nn.ModuleList(nn.Linear(math.prod(shape), HIDDEN) for shape in spec.inputs)
        self.dropout = nn.Dropout(spec.dropout)
        self.write = nn.Linear(HIDDEN, math.prod(spec.output) * (1 if self.parts == "one" else 2))
        self.requires_grad_(not spec.frozen)

    def forward(self, *sources: Tensor, shift: Tensor | None = None, gain: Tensor | None = None) -> Any:
        h = torch.stack([read(x.flatten(1)) for read, x in zip(self.read, sources, strict=True)]).sum(0)
        h = torch.tanh(h if shift is None else h + shift)
        h = h if gain is None else h * gain
        update = self.write(self.dropout(h))
        if self.parts == "doubled":
            update = update.unflatten(-1, (*self.shape[:-1], 2 * self.shape[-1]))
        elif self.parts == "pair":
            update = tuple(part.unflatten(-1, self.shape) for part in update.chunk(2, -1))
        else:
            update = update.unflatten(-1, self.shape)
        return (update, h.square().mean()) if self.aux else update


# Drawing a program

ROUTES: tuple[tuple[Any, dict[str, str]], ...] = (
    (None, {"shift": "shift", "gain": "gain"}),
    ("all", {"shift": "shift", "gain": "gain"}),
    (["gain"], {"gain": "gain"}),
    ({"shift": "gain"}, {"shift": "gain"}),
    ({"shift": "shift", "gain": "shift"}, {"shift": "shift", "gain": "shift"}),
    ([], {}),
)


@st.composite
def steps(draw: Any, shapes: list[Shape], kinds: Sequence[str], dropouts: Sequence[float]) -> StepSpec:
    """A step that fits streams of these shapes. It brings `shapes` up to date where a stream is replaced."""
    target = draw(st.integers(0, len(shapes) - 1))
    kind = draw(st.sampled_from(kinds))
    readable = [i for i in range(len(shapes)) if i != target or kind == "replace"]
    sources = tuple(draw(st.lists(st.sampled_from(readable), min_size=1, max_size=3, unique=True)))
    read = tuple(shapes[i] for i in sources)
    reads: Literal["each", "sum"] = "sum" if len(set(read)) == 1 and draw(st.booleans()) else "each"
    if kind == "replace":
        shapes[target] = draw(st.sampled_from(SHAPES))
    takes, routes = draw(st.sampled_from(ROUTES))
    return StepSpec(
        target=target,
        sources=sources,
        kind=kind,
        reads=reads,
        inputs=read[:1] if reads == "sum" else read,
        output=shapes[target],
        takes=takes,
        routes=routes,
        dropout=draw(st.sampled_from(dropouts)),
        aux=draw(st.integers(0, 5)) == 5,
        frozen=draw(st.integers(0, 5)) == 5,
    )


@st.composite
def blocks(draw: Any, shapes: list[Shape], kinds: Sequence[str], dropouts: Sequence[float]) -> BlockSpec:
    found = draw(st.lists(st.deferred(lambda: steps(shapes, kinds, dropouts)), min_size=1, max_size=3))
    if all(step.kind != "replace" for step in found) and draw(st.integers(0, 3)) == 3:
        found.append(found[0])
    order = draw(st.permutations(range(len(shapes)))) if len(shapes) > 1 and draw(st.booleans()) else None
    if order is not None:
        shapes[:] = [shapes[i] for i in order]
    return BlockSpec(tuple(found), None if order is None else tuple(order))


@st.composite
def programs(draw: Any, *, invertible: bool = False, dropouts: Sequence[float] = (0.0, 0.0, 0.3)) -> Program:
    count = draw(st.sampled_from([2, 2, 3, 3, 4, 4] if invertible else [2, 2, 3, 3, 4, 1]))
    alike = draw(st.booleans())
    first = draw(st.sampled_from(SHAPES))
    shapes = [first if alike else draw(st.sampled_from(SHAPES)) for _ in range(count)]
    initial = tuple(shapes)
    sequence: list[BlockSpec] = []
    for _ in range(draw(st.integers(1, 5))):
        replaces = not invertible and (count == 1 or draw(st.integers(0, 4)) == 4)
        before = list(shapes)
        block = draw(blocks(shapes, ("replace",) if count == 1 else INVERTIBLE + ("replace",) * replaces, dropouts))
        sequence += [block] * (2 if shapes == before and draw(st.integers(0, 3)) == 3 else 1)
    depth = len(sequence)
    every = [step for block in sequence for step in block.steps]
    taken = sorted({name for step in every for name in step.routes.values()})
    inputs = tuple(initial.index(shape) if alike and draw(st.booleans()) else i for i, shape in enumerate(initial))
    return Program(
        seed=draw(st.integers(0, 2**16)),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        names=_names(sequence, count, draw(st.booleans())),
        shapes=initial,
        inputs=inputs,
        strided=draw(st.booleans()),
        input_grads=tuple(draw(st.integers(0, 2)) > 0 for _ in initial),
        context={name: draw(st.booleans()) for name in taken if draw(st.integers(0, 2)) > 0},
        blocks=tuple(sequence),
        memory=tuple(draw(st.sampled_from(_modes(block))) for block in sequence),
        anchors=frozenset(draw(st.lists(st.integers(0, depth - 1), max_size=2))),
        hidden=tuple(draw(st.lists(st.integers(0, depth - 1), max_size=2, unique=True))),
        used=tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))),
        passes=draw(st.sampled_from(["once", "twice", "apart"])),
    )


def _names(sequence: Sequence[BlockSpec], count: int, wants_names: bool) -> tuple[Any, ...]:
    """Positions can name the streams only if the steps tell how many there are."""
    last = [any(count - 1 in (step.target, *step.sources) for step in block.steps) for block in sequence]
    told = any(last) and all(seen or block.order is None for seen, block in zip(last, sequence, strict=True))
    return tuple("abcd"[:count]) if wants_names or not told else tuple(range(count))


def _modes(block: BlockSpec) -> list[str]:
    return ["reverse", "reverse", "checkpoint", "store"] if block.invertible else ["checkpoint", "store"]
