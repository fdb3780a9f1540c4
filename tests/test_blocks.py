"""Every block, coupling, split and merge computes what it says, backward and inverse included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from stacks import MEMORIES, Mlp, all_close, memory_of, sample
from torch import Tensor, nn

import retrograde as rg
from retrograde.couplings import Additive, Affine, Coupling, Replace, Scaled

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
        streams = tuple(sample(*shape, seed=i) for i, shape in enumerate(shapes))
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


class Between(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, b: Tensor, c: Tensor) -> Tensor:
        return self.inner(c - 2 * b)


class Rotated(nn.Module):
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


@pytest.mark.parametrize("split", ["duplicate", "chunk", "first"])
@pytest.mark.parametrize("merge", ["mean", "sum", "concat", "first", None])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_split_and_merge_are_what_their_names_say_on_any_dim(split: Any, merge: Any, rank: int) -> None:
    for dim in range(-rank, rank):
        x = sample(*(6, 4, 2, 8, 2)[:rank])
        z = x.detach().clone().requires_grad_()
        stack = rg.ReversibleSequence([rg.two_stream(torch.sin, torch.cos)] * 2, split=split, merge=merge, dim=dim)
        y = stack(x)
        a, b = {
            "duplicate": lambda: (z, z),
            "chunk": lambda: z.tensor_split(2, dim),
            "first": lambda: (z, torch.zeros_like(z)),
        }[split]()
        for _ in range(2):
            a = a + b.sin()
            b = b + a.cos()
        expected = {
            "mean": lambda: (a + b) / 2,
            "sum": lambda: a + b,
            "concat": lambda: torch.cat([a, b], dim),
            "first": lambda: a,
            None: lambda: (a, b),
        }[merge]()
        y, expected = (y, expected) if merge is None else ((y,), (expected,))
        loss_of(y).backward()
        loss_of(expected).backward()
        all_close([*y, x.grad], [*expected, z.grad])


@every_memory
@pytest.mark.parametrize("split", ["duplicate", "chunk"])
@pytest.mark.parametrize("rank", [4, 5])
def test_channels_last_input_is_kept_and_differentiated(memory: str, split: Any, rank: int) -> None:
    """In float64 the gradients; and the rebuilt input of a branch has the layout that its first run had."""
    convolution = {4: nn.Conv2d, 5: nn.Conv3d}[rank]
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[rank]
    pairs = [tuple(Strided(convolution(4, 4, 3, padding=1).double()) for _ in range(2)) for _ in range(3)]
    twins = copy.deepcopy(pairs)
    stack = rg.ReversibleSequence([rg.two_stream(*p) for p in pairs], split=split, dim=1, memory=memory_of(memory, 3))
    x = sample(2, 4 if split == "duplicate" else 8, *[3] * (rank - 2))
    x = x.detach().to(memory_format=layout).requires_grad_()
    z = x.detach().clone().requires_grad_()
    a, b = (z, z) if split == "duplicate" else z.chunk(2, 1)
    for f, g in twins:
        a = a + f(b)
        b = b + g(a)
    y = stack(x)
    loss_of((y,)).backward()
    loss_of(((a + b) / 2,)).backward()
    ours = [p.grad for f in pairs for m in f for p in m.parameters()]
    theirs = [p.grad for f in twins for m in f for p in m.parameters()]
    all_close([y, x.grad, *ours], [(a + b) / 2, z.grad, *theirs])
    for branch in (m for pair in pairs for m in pair):
        assert len(set(branch.strides)) == 1


class Strided(nn.Module):
    """Notes the strides of its inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.strides = inner, []

    def forward(self, x: Tensor) -> Tensor:
        self.strides.append(x.stride())
        return torch.tanh(self.inner(x))


@every_memory
def test_hidden_states_are_the_streams_after_their_blocks(memory: str) -> None:
    pairs = [(Mlp(), Mlp()) for _ in range(4)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=memory_of(memory, 4))
    x = sample(4, 6)
    outputs = stack.run(x, hidden=[-1, 0, 2])
    a = b = x
    for i, (f, g) in enumerate(pairs):
        a = a + f(b)
        b = b + g(a)
        if i in (0, 2, 3):
            all_close(outputs.hidden[i], (a, b))
    assert sorted(outputs.hidden) == [0, 2, 3]
    all_close(outputs, (a, b))


def test_the_inverse_is_differentiable_and_takes_context() -> None:
    """Of the output the inverse gives the input, so its Jacobian is the inverse of the other."""
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(2), Mlp(2)) for _ in range(2)], merge=None)
    shift = sample(2, seed=3)

    def there(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(stack((a, b), shift=shift))

    def back(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(stack.inverse((a, b), shift=shift))

    x = (sample(1, 2), sample(1, 2, seed=2))
    y = tuple(t.detach() for t in there(*x))
    one, other = (
        torch.cat([torch.cat([j.reshape(2, 2) for j in row], 1) for row in torch.autograd.functional.jacobian(f, v)])
        for f, v in ((there, x), (back, y))
    )
    all_close([one @ other], [torch.eye(4).double()])
    assert torch.autograd.gradcheck(back, y[:0] + tuple(t.requires_grad_() for t in y))


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
