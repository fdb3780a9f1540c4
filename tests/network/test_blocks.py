"""Every block, coupling, split and merge computes what it says, backward and inverse included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.couplings import Additive, Affine, Coupling, Replace, Scaled
from stacks import MEMORIES, Mlp, all_close, memory_of, sample

every_memory = pytest.mark.parametrize("memory", MEMORIES)
not_reverse = pytest.mark.parametrize("memory", ["store", "checkpoint"])


def loss_of(streams: Sequence[Tensor]) -> Tensor:
    return sum(((i + 1) * s.sin() * s).sum() for i, s in enumerate(streams))


def compare(
    blocks: Sequence[rg.Block],
    reference: Callable[[tuple[Tensor, ...]], Sequence[Tensor]],
    memory: Any,
    *shapes: tuple[int, ...],
    modules: Sequence[nn.Module] = (),
) -> None:
    """Streams, their gradients, those of parameters, and the inverse, of blocks and of a plain loop over `modules`."""
    stack = rg.ReversibleSequence(blocks, merge=None, memory=memory)
    parameters = [p for m in modules for p in m.parameters()]
    found = []
    for run in (stack, reference):
        streams = tuple(sample(*shape, seed=i) for i, shape in enumerate(shapes))
        out = run(streams)
        found.append((*out, *torch.autograd.grad(loss_of(out), [*streams, *parameters])))
    all_close(*found)
    if all(block.invertible for block in blocks):
        streams = tuple(sample(*shape, seed=i, grad=False) for i, shape in enumerate(shapes))
        with torch.no_grad():
            all_close(stack.inverse(stack.run(streams)), streams)


@every_memory
@pytest.mark.parametrize("gamma", [0.9, 0.5])
def test_momentum_is_its_formula(memory: str, gamma: float) -> None:
    fs = [Mlp() for _ in range(4)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        x, v = streams
        for f in fs:
            v = gamma * v + (1 - gamma) * f(x)
            x = x + v
        return x, v

    blocks = [rg.momentum(f, gamma=gamma) for f in fs]
    compare(blocks, reference, memory_of(memory, 4), (4, 6), (4, 6), modules=fs)


@every_memory
@pytest.mark.parametrize("step", [1.0, 0.25])
@pytest.mark.parametrize("depth", [3, 4])
def test_midpoint_is_its_formula_and_swaps_the_streams(memory: str, step: float, depth: int) -> None:
    fs = [Mlp() for _ in range(depth)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        previous, current = streams
        for f in fs:
            previous, current = current, previous + 2 * step * f(current)
        return previous, current

    blocks = [rg.midpoint(f, step=step) for f in fs]
    compare(blocks, reference, memory_of(memory, depth), (4, 6), (4, 6), modules=fs)


@every_memory
@pytest.mark.parametrize("count", [2, 3, 5])
def test_grouped_is_its_formula(memory: str, count: int) -> None:
    groups = [[Mlp() for _ in range(count)] for _ in range(3)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        s = list(streams)
        for branches in groups:
            s[0] = s[0] + branches[0](sum(s[2:], s[1]))
            for i in range(1, count):
                s[i] = s[i] + branches[i](s[i - 1])
        return s

    blocks = [rg.grouped(*branches) for branches in groups]
    flat = [branch for branches in groups for branch in branches]
    compare(blocks, reference, memory_of(memory, 3), *[(4, 6)] * count, modules=flat)


@pytest.mark.parametrize("middle", ["store", "checkpoint"])
@pytest.mark.parametrize("around", ["store", "checkpoint", "reverse"])
def test_a_transition_between_reversible_blocks_changes_the_shape(middle: str, around: str) -> None:
    before, after = [Mlp(), Mlp()], [Mlp(3), Mlp(3)]
    down = [nn.Linear(6, 3).double(), nn.Linear(6, 3).double()]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        a, b = streams
        a = a + before[0](b)
        b = b + before[1](a)
        a, b = down[0](a).tanh(), down[1](b).tanh()
        a = a + after[0](b)
        return a, b + after[1](a)

    blocks = [
        rg.two_stream(*before),
        rg.transition(*(nn.Sequential(d, nn.Tanh()) for d in down)),
        rg.two_stream(*after),
    ]
    compare(blocks, reference, [around, middle, around], (4, 6), (4, 6), modules=[*before, *down, *after])


@every_memory
def test_named_streams_of_different_shapes_are_read_by_name_and_in_any_number(memory: str) -> None:
    """Three scales, each updated from the two others."""

    class Fuse(nn.Module):
        def __init__(self, width: int, *others: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(other, width).double() for other in others)

        def forward(self, *sources: Tensor) -> Tensor:
            return torch.stack([p(s).sin() for p, s in zip(self.parts, sources, strict=True)]).prod(0)

    layers = [(Fuse(2, 3, 5), Fuse(3, 5, 2), Fuse(5, 2, 3)) for _ in range(3)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        fine, middle, coarse = streams
        for f, g, h in layers:
            fine = fine + f(middle, coarse)
            middle = middle + g(coarse, fine)
            coarse = coarse + h(fine, middle)
        return fine, middle, coarse

    blocks = [
        rg.Block(
            rg.Step(f, "fine", ["middle", "coarse"]),
            rg.Step(g, "middle", ["coarse", "fine"]),
            rg.Step(h, "coarse", ["fine", "middle"]),
        )
        for f, g, h in layers
    ]
    flat = [m for layer in layers for m in layer]
    compare(blocks, reference, memory_of(memory, 3), (4, 2), (4, 3), (4, 5), modules=flat)
    stack = rg.ReversibleSequence(blocks, merge=None)
    assert stack.names == ("fine", "middle", "coarse")
    by_name = {"coarse": sample(4, 5), "fine": sample(4, 2), "middle": sample(4, 3)}
    out = stack.run(by_name)
    all_close([out.named()["coarse"]], [reference((by_name["fine"], by_name["middle"], by_name["coarse"]))[2]])


@every_memory
def test_streams_named_in_another_order_by_each_block_stay_who_they_are(memory: str) -> None:
    f, g = Mlp(), Mlp()
    blocks = [rg.Block(rg.Step(f, "x", ["y"])), rg.Block(rg.Step(g, "y", ["x"])), rg.Block(rg.Step(f, "x", ["y"]))]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        x, y = streams
        x = x + f(y)
        y = y + g(x)
        return x + f(y), y

    compare(blocks, reference, memory_of(memory, 3), (4, 6), (4, 6), modules=[f, g])


def test_a_block_shared_by_two_sequences_works_in_both() -> None:
    """Each sequence orders the streams as it meets their names."""
    f, g = Mlp(), Mlp()
    block = rg.Block(rg.Step(f, "x", ["y"]))
    one = rg.ReversibleSequence([block], merge=None)
    x, y = sample(4, 6), sample(4, 6, seed=2)
    expected = (x + f(y), y)
    all_close(one((x, y)), expected)
    two = rg.ReversibleSequence([rg.Block(rg.Step(g, "y", ["x"])), block], merge=None)
    assert two.names == ("y", "x")
    all_close(one((x, y)), expected)


@every_memory
def test_a_sequence_made_of_the_same_blocks_between_forward_and_backward_does_no_harm(memory: str) -> None:
    fs = [Mlp() for _ in range(4)]
    blocks = [rg.midpoint(f) for f in fs]
    stack = rg.ReversibleSequence(blocks, merge=None, memory=memory_of(memory, 4))
    found = []
    for build in ("retrograde", "plain"):
        x, z = sample(4, 6), sample(4, 6, seed=2)
        a, b = x, z
        if build == "retrograde":
            a, b = stack((x, z))
            rg.ReversibleSequence(blocks)
        else:
            for f in fs:
                a, b = b, a + 2 * f(b)
        found.append((a, b, *torch.autograd.grad(loss_of((a, b)), [x, z])))
    all_close(*found)


@every_memory
@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_a_block_hands_its_streams_on_in_the_order_it_is_given(memory: str, order: tuple[int, int]) -> None:
    pairs = [(Mlp(), Mlp()) for _ in range(3)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        a, b = streams
        for f, g in pairs:
            a = a + f(b)
            b = b + g(a)
            a, b = [(a, b)[i] for i in order]
        return a, b

    blocks = [rg.Block(rg.Step(f, 0, [1]), rg.Step(g, 1, [0]), order=order) for f, g in pairs]
    compare(blocks, reference, memory_of(memory, 3), (4, 6), (4, 6), modules=[m for pair in pairs for m in pair])


@every_memory
def test_three_streams_may_rotate(memory: str) -> None:
    fs = [Mlp() for _ in range(4)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        a, b, c = streams
        for f in fs:
            a, b, c = b, c, a + f(c - 2 * b)
        return a, b, c

    blocks = [rg.Block(rg.Step(Between(f), 0, [1, 2]), order=(1, 2, 0)) for f in fs]
    compare(blocks, reference, memory_of(memory, 4), (4, 6), (4, 6), (4, 6), modules=fs)


class Weighed(Mlp):
    """Returns a loss that hangs on its parameters alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.inner(x.detach()).cos().sum()


@every_memory
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_losses_of_single_blocks_may_be_differentiated_in_any_order_before_the_output(
    memory: str, order: tuple[int, ...]
) -> None:
    """Each frees its own part of the graph; the streams of a later block are reached from those of an earlier one."""
    fs = [Weighed() for _ in range(4)]
    blocks = [rg.Block(rg.Step(f, 0, [1], aux="loss"), order=(1, 0)) for f in fs]
    stack = rg.ReversibleSequence(blocks, merge=None, memory=memory_of(memory, 4))
    found = []
    for build in ("retrograde", "plain"):
        for f in fs:
            f.zero_grad()
        x, z = sample(4, 6), sample(4, 6, seed=2)
        a, b, losses = x, z, {}
        if build == "retrograde":
            outputs = stack.run((x, z))
            (a, b), losses = outputs, {i: loss for i, (loss,) in outputs.aux_by_block.items()}
        else:
            for i, f in enumerate(fs):
                update, losses[i] = f(b)
                a, b = b, a + update
        for i in order:
            losses[i].backward()
        loss_of((a, b)).backward()
        found.append([x.grad, z.grad, *(p.grad.clone() for f in fs for p in f.parameters())])
    all_close(*found)


class Between(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, b: Tensor, c: Tensor) -> Tensor:
        return self.inner(c - 2 * b)


class Rotated(rg.couplings.Coupling, nn.Module):
    """A coupling of one's own, with parameters: `target * exp(gate) + update @ mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(sample(6, seed=8).detach() * 0.3)
        self.mix = nn.Parameter(sample(6, 6, seed=9).detach())

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target * self.gate.exp() + update @ self.mix

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return (combined - update @ self.mix) * (-self.gate).exp()


class Pair(nn.Module):
    """The two parts of an affine update, as a pair or as one wide tensor along `dim`."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.one, self.two, self.dim = Mlp(), Mlp(), dim

    def forward(self, x: Tensor) -> Any:
        parts = self.one(x), self.two(x)
        return parts if self.dim is None else torch.cat(parts, self.dim)


def affine(limit: float | None) -> Callable[[Tensor, Any], Tensor]:
    def combine(target: Tensor, update: Any, dim: int = -1) -> Tensor:
        log_scale, shift = update
        log_scale = log_scale if limit is None else limit * torch.tanh(log_scale / limit)
        return target * torch.exp(log_scale) + shift

    return combine


COUPLINGS: dict[str, tuple[Any, Callable[[], nn.Module], Any]] = {
    "additive": (Additive(), Mlp, lambda t, u: t + u),
    "scaled": (Scaled(keep=0.8, scale=0.3), Mlp, lambda t, u: 0.8 * t + 0.3 * u),
    "scaled keep": (Scaled(keep=-1.5), Mlp, lambda t, u: u - 1.5 * t),
    "affine pair": (Affine(), lambda: Pair(None), affine(None)),
    "affine wide": (Affine(), lambda: Pair(-1), lambda t, u: affine(None)(t, u.chunk(2, -1))),
    "affine on dim 0": (Affine(dim=0), lambda: Pair(0), lambda t, u: affine(None)(t, u.chunk(2, 0))),
    "affine limited": (Affine(limit=0.7), lambda: Pair(None), affine(0.7)),
    "one's own": (Rotated(), Mlp, lambda t, u: t * COUPLINGS["one's own"][0].gate.exp() + u @ _mix()),
}


def _mix() -> Tensor:
    return COUPLINGS["one's own"][0].mix


@every_memory
@pytest.mark.parametrize("name", COUPLINGS)
def test_a_coupling_is_its_formula(memory: str, name: str) -> None:
    coupling, branch, formula = COUPLINGS[name]
    pairs = [(branch(), branch()) for _ in range(3)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        a, b = streams
        for f, g in pairs:
            a = formula(a, f(b))
            b = formula(b, g(a))
        return a, b

    blocks = [rg.two_stream(f, g, coupling=coupling) for f, g in pairs]
    modules = [m for pair in pairs for m in pair] + ([coupling] if isinstance(coupling, nn.Module) else [])
    compare(blocks, reference, memory_of(memory, 3), (4, 6), (4, 6), modules=modules)


@not_reverse
def test_replace_may_read_its_own_target(memory: str) -> None:
    fs = [Between(Mlp()) for _ in range(3)]

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        a, b = streams
        for f in fs:
            a = f(a, b)
        return a, b

    blocks = [rg.Block(rg.Step(f, 0, [0, 1], coupling=Replace())) for f in fs]
    compare(blocks, reference, memory, (4, 6), (4, 6), modules=fs)


class Typeless(Coupling):
    """A coupling that derives from `Coupling` and leaves the check of fit to it."""

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target + update.sin()

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined - update.sin()


@every_memory
def test_a_coupling_may_be_derived_from_the_base_class(memory: str) -> None:
    f, g = Mlp(), Mlp()

    def reference(streams: tuple[Tensor, ...]) -> Sequence[Tensor]:
        a, b = streams
        for _ in range(3):
            a = a + f(b).sin()
            b = b + g(a).sin()
        return a, b

    blocks = [rg.two_stream(f, g, coupling=Typeless())] * 3
    compare(blocks, reference, memory_of(memory, 3), (4, 6), (4, 6), modules=[f, g])
