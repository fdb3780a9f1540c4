"""Whole programs, drawn at random, against a plain loop in ordinary autograd.

A program is any stack that the library allows: streams of different shapes, steps with random targets and sources,
couplings, context routed by `takes`, orders, shared blocks, a memory plan with anchors, losses on hidden streams and on
some of the outputs. The loop (`plain`) has nothing of retrograde's in it: it knows the couplings as formulas.

Tolerances. Inverting a step returns a stream up to rounding, and amplifies the error that it was given: by 1/0.8
(Scaled) or e^0.3 (Affine, limited), and not at all (Additive). Over 3,000 programs of up to 40 steps the largest
relative error of a gradient was 4e-15 in float64 and 1.5e-6 in float32, and of an inverted stream 3e-14 and 1.2e-5.
The limits are more than ten times that: 1e-12 and 2e-5, and ten times as much for the inverse. That is a fiftieth of a
thousandth, so that an inverse that is off by a thousandth is seen; a test holds that for each coupling.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import retrograde as rg
from retrograde.couplings import Additive, Affine, Replace, Scaled

BATCH, HIDDEN = 2, 5
SHAPES = ((3,), (4,), (2, 3), (3, 2), (2, 2, 2))
CONTEXT = ("shift", "gain")


class Gate:
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


# Running a program

Branches = dict[StepSpec, Branch]


@dataclass
class Seen:
    """What a run shows: the streams after it and on the way, the sum of auxiliary losses, and the gradients."""

    outputs: tuple[Tensor, ...]
    hidden: dict[int, tuple[Tensor, ...]]
    aux: Tensor | None
    gradients: dict[str, Tensor | None]
    generator: Tensor

    def values(self) -> list[Tensor]:
        on_the_way = [stream for i in sorted(self.hidden) for stream in self.hidden[i]]
        return [*self.outputs, *on_the_way, *([] if self.aux is None else [self.aux])]


def branches_of(program: Program) -> Branches:
    torch.manual_seed(program.seed)
    return {step: Branch(step).to(program.dtype) for block in program.blocks for step in block.steps}


def tensors_of(program: Program) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Fresh inputs and context, the same each time."""
    generator = torch.Generator().manual_seed(program.seed)
    inputs = []
    for shape, requires_grad in zip(program.shapes, program.input_grads, strict=True):
        if program.strided and len(shape) > 1:
            x = torch.randn((BATCH, *reversed(shape)), generator=generator, dtype=program.dtype)
            x = x.permute(0, *range(len(shape), 0, -1))
        else:
            x = torch.randn((BATCH, *shape), generator=generator, dtype=program.dtype)
        inputs.append(x.requires_grad_(requires_grad))
    context = {
        name: torch.randn(HIDDEN, generator=generator, dtype=program.dtype).requires_grad_(requires_grad)
        for name, requires_grad in program.context.items()
    }
    return inputs, context


def build(program: Program, branches: Branches) -> rg.ReversibleSequence:
    name = program.names
    made: dict[BlockSpec, rg.Block] = {}
    for spec in dict.fromkeys(program.blocks):
        parts = {
            step: rg.Step(
                branches[step],
                target=name[step.target],
                sources=[name[i] for i in step.sources],
                coupling=KINDS[step.kind].coupling,
                takes=step.takes,
                reads=step.reads,
                aux="loss" if step.aux else "none",
            )
            for step in dict.fromkeys(spec.steps)
        }
        streams = name if isinstance(name[0], str) else None
        made[spec] = rg.Block(*(parts[step] for step in spec.steps), streams=streams, order=spec.order)
    plan = rg.Plan(program.memory, anchors=program.anchors)  # type: ignore[arg-type]
    return rg.ReversibleSequence([made[spec] for spec in program.blocks], merge=None, memory=plan)


Run = tuple[tuple[Tensor, ...], dict[int, tuple[Tensor, ...]], Tensor | None]


def plain(program: Program, branches: Branches, streams: Sequence[Tensor], context: Mapping[str, Tensor]) -> Run:
    """The program in ordinary autograd."""
    now = [x.contiguous() for x in streams]
    hidden, losses = {}, []
    for i, block in enumerate(program.blocks):
        for step in block.steps:
            sources = [now[j] for j in step.sources]
            if step.reads == "sum":
                sources = [functools.reduce(torch.add, sources)]
            given = {parameter: context[name] for parameter, name in step.routes.items() if name in context}
            update = branches[step](*sources, **given)
            if step.aux:
                update, loss = update
                losses.append(loss)
            parts = update if isinstance(update, tuple) else (update,)
            if KINDS[step.kind].parts == "doubled":
                parts = update.chunk(2, -1)
            now[step.target] = KINDS[step.kind].formula(now[step.target], *parts)
        if block.order is not None:
            now = [now[j] for j in block.order]
        if i in program.hidden:
            hidden[i] = tuple(now)
    declared = any(step.aux for block in program.blocks for step in block.steps)
    return tuple(now), hidden, torch.stack(losses).sum() if declared else None


def loss_of(program: Program, tensors: Sequence[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(program.seed + 2)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors]
    return torch.stack([(x * weight).sum() for x, weight in zip(tensors, weights, strict=True)]).sum()


def differentiate(program: Program, tensors: Sequence[Tensor]) -> None:
    """Gradients for all leaves, by one backward pass or two."""
    loss = loss_of(program, tensors)
    if loss.requires_grad:
        if program.passes == "twice":
            loss.backward(retain_graph=True)
        loss.backward()


def gradient_at(program: Program, ends: Sequence[Tensor], hidden: Mapping[int, Sequence[Tensor]]) -> Tensor | None:
    """The gradient of what comes after the first hidden state, for its stream that was updated last.

    The steps before it have had their backward pass, and what they saved is gone; none of them is on the way.
    """
    block = program.blocks[min(hidden)]
    target = block.steps[-1].target
    stream = hidden[min(hidden)][target if block.order is None else block.order.index(target)]
    loss = loss_of(program, ends)
    if not loss.requires_grad or not stream.requires_grad:
        return None
    return torch.autograd.grad(loss, stream, allow_unused=True)[0]


def observe(program: Program, branches: Branches, run: Callable[..., Run]) -> Seen:
    """Run forward and backward, and gather all there is to see."""
    for branch in branches.values():
        branch.zero_grad()
    inputs, context = tensors_of(program)
    torch.manual_seed(program.seed + 1)
    outputs, hidden, aux = run([inputs[i] for i in program.inputs], context)
    seen = Seen(outputs, hidden, aux, {}, torch.get_rng_state())
    ends = [outputs[i] for i in program.used]
    if program.passes == "apart" and hidden:
        differentiate(program, hidden[min(hidden)])
        seen.gradients["the hidden stream"] = gradient_at(program, ends, hidden)
    else:
        differentiate(program, ends + [x for i in sorted(hidden) for x in hidden[i]] + ([] if aux is None else [aux]))
    leaves = {f"input {i}": x for i, x in enumerate(inputs)} | {f"context {n}": c for n, c in context.items()}
    for i, branch in enumerate(branches.values()):
        leaves |= {f"{name} of branch {i}": p for name, p in branch.named_parameters()}
    seen.gradients |= {name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in leaves.items()}
    assert torch.equal(torch.get_rng_state(), seen.generator), "the backward pass moved the generator"
    return seen


def of_stack(program: Program, branches: Branches, **options: Any) -> Callable[..., Run]:
    stack = build(program, branches)

    def run(streams: Sequence[Tensor], context: Mapping[str, Tensor]) -> Run:
        outputs = stack.run(tuple(streams), hidden=program.hidden, **options, **context)
        return tuple(outputs), outputs.hidden, outputs.aux

    return run


def of_loop(program: Program, branches: Branches) -> Callable[..., Run]:
    return functools.partial(plain, program, branches)


# Comparing


def assert_close(got: Tensor, expected: Tensor, tolerance: float, name: str, floor: float = 0.0) -> None:
    """Equal to a relative error, measured against the largest entry, or against `floor` where that is larger."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), f"{name}: {got.shape} for {expected.shape}"
    scale = max(expected.abs().max().item(), floor)
    error = (got - expected).abs().max().item()
    assert error <= tolerance * scale, f"{name}: off by {error:.3g} at a scale of {scale:.3g}"


def assert_same(got: Seen, expected: Seen, tolerance: float) -> None:
    for i, (one, other) in enumerate(zip(got.values(), expected.values(), strict=True)):
        assert_close(one, other, tolerance, f"value {i}")
    assert torch.equal(got.generator, expected.generator)
    found = [g for g in expected.gradients.values() if g is not None]
    floor = 0.01 * max((g.abs().max().item() for g in found), default=0.0)  # for gradients that cancel out
    for name, gradient in expected.gradients.items():
        ours = got.gradients[name]
        assert (ours is None) == (gradient is None), f"the gradient of {name} is {ours}, not {gradient}"
        if ours is not None and gradient is not None:
            assert_close(ours, gradient, tolerance, f"the gradient of {name}", floor)


def compare(program: Program) -> None:
    branches = branches_of(program)
    copies = dict(zip(branches, copy.deepcopy(list(branches.values())), strict=True))
    expected = observe(program, copies, of_loop(program, copies))
    got = observe(program, branches, of_stack(program, branches))
    assert_same(got, expected, program.tolerance)


# The claims

drawn = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@drawn
@given(programs())
def test_any_program_gives_the_gradients_that_plain_autograd_gives(program: Program) -> None:
    compare(program)


@drawn
@given(programs(invertible=True))
def test_the_late_part_of_a_program_can_be_walked_after_the_early_part(program: Program) -> None:
    """Without retain_graph: by then the last streams are gone, and the way to the late steps is up, not down."""
    reverse = ("reverse",) * len(program.blocks)
    compare(replace(program, memory=reverse, anchors=frozenset(), hidden=(0,), passes="apart"))


@drawn
@given(programs())
def test_memory_never_changes_a_bit_of_what_is_computed_forward(program: Program) -> None:
    branches = branches_of(program)
    expected = observe(program, branches, of_stack(program, branches, memory="store")).values()
    plans: list[Any] = [None, "checkpoint", *(["reverse"] if program.invertible else [])]
    for memory in plans:
        seen = observe(program, branches, of_stack(program, branches, memory=memory)).values()
        assert all(map(torch.equal, seen, expected)), f"memory={memory!r}"
    with torch.no_grad():
        seen = observe(program, branches, of_stack(program, branches)).values()
    assert all(map(torch.equal, seen, expected)), "under no_grad"


@drawn
@given(programs(invertible=True, dropouts=(0.0,)))
def test_the_inverse_gives_back_what_went_in(program: Program) -> None:
    stack = build(program, branches_of(program))
    inputs, context = tensors_of(program)
    streams = [inputs[i] for i in program.inputs]
    back = stack.inverse(stack.run(tuple(streams), **context), **context)
    scale = max(x.abs().max().item() for x in streams)
    for i, (got, expected) in enumerate(zip(back, streams, strict=True)):
        assert_close(got, expected, 10 * program.tolerance, f"stream {i}", scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["additive", "momentum", "half", "affine", "limited", "gate"])
def test_an_inverse_that_is_off_by_a_thousandth_is_seen(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = two_streams(kind, dtype)
    compare(program)
    coupling = type(KINDS[kind].coupling)
    separate = coupling.separate
    monkeypatch.setattr(coupling, "separate", lambda self, *args: 1.001 * separate(self, *args))
    with pytest.raises((AssertionError, ValueError), match=r"off by"):  # couplings of a user's own are checked anyway
        compare(program)


def two_streams(kind: str, dtype: torch.dtype) -> Program:
    """A program of three blocks, each updating either stream from the other, with nothing else to it."""
    shape = (4,)

    def step(target: int) -> StepSpec:
        return StepSpec(target, (1 - target,), kind, "each", (shape,), shape, None, {}, 0.0, False, False)

    return Program(
        seed=0,
        dtype=dtype,
        names=(0, 1),
        shapes=(shape, shape),
        inputs=(0, 1),
        strided=False,
        input_grads=(True, True),
        context={},
        blocks=tuple(BlockSpec((step(0), step(1)), None) for _ in range(3)),
        memory=("reverse",) * 3,
        anchors=frozenset(),
        hidden=(),
        used=(0, 1),
        passes="once",
    )
