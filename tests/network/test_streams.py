"""Tensors in, tensors out: split, merge, memory layout, hidden states and the inverse."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import (
    MEMORIES,
    Mlp,
    all_close,
    memory_of,
    sample,
)

every_memory = pytest.mark.parametrize("memory", MEMORIES)


def loss_of(streams: Sequence[Tensor]) -> Tensor:
    return sum(((i + 1) * s.sin() * s).sum() for i, s in enumerate(streams))


def split_plainly(x: Tensor, split: str, dim: int) -> tuple[Tensor, Tensor]:
    if split == "chunk":
        a, b = x.tensor_split(2, dim)
        return a, b
    return (x, x) if split == "duplicate" else (x, torch.zeros_like(x))


def merge_plainly(a: Tensor, b: Tensor, merge: str | None, dim: int) -> tuple[Tensor, ...]:
    if merge is None:
        return a, b
    if merge == "concat":
        return (torch.cat([a, b], dim),)
    return ({"mean": (a + b) / 2, "sum": a + b, "first": a}[merge],)


@pytest.mark.parametrize("split", ["duplicate", "chunk", "first"])
@pytest.mark.parametrize("merge", ["mean", "sum", "concat", "first", None])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_split_and_merge_are_what_their_names_say_on_any_dim(split: Any, merge: Any, rank: int) -> None:
    for dim in range(-rank, rank):
        x = sample(*(6, 4, 2, 8, 2)[:rank])
        z = x.detach().clone().requires_grad_()
        stack = rg.ReversibleSequence([rg.two_stream(torch.sin, torch.cos)] * 2, split=split, merge=merge, dim=dim)
        y = stack(x) if merge is None else (stack(x),)
        a, b = split_plainly(z, split, dim)
        for _ in range(2):
            a = a + b.sin()
            b = b + a.cos()
        expected = merge_plainly(a, b, merge, dim)
        loss_of(y).backward()
        loss_of(expected).backward()
        all_close([*y, x.grad], [*expected, z.grad])


@every_memory
@pytest.mark.parametrize("split", ["duplicate", "chunk"])
@pytest.mark.parametrize("rank", [4, 5])
def test_channels_last_input_is_kept_and_differentiated(memory: str, split: Any, rank: int) -> None:
    """In float64 the gradients; and the recomputed input of a branch has the layout that its first run had."""
    convolution = {4: nn.Conv2d, 5: nn.Conv3d}[rank]
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[rank]
    pairs = [tuple(Strided(convolution(4, 4, 3, padding=1).double()) for _ in range(2)) for _ in range(3)]
    twins = copy.deepcopy(pairs)
    stack = rg.ReversibleSequence(
        [rg.two_stream(*p) for p in pairs], split=split, merge="mean", dim=1, memory=memory_of(memory, 3)
    )
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


class Transposing(rg.couplings.Coupling):
    """An additive coupling whose two ways leave the stream in different memory layouts."""

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return (target + update).t().contiguous().t()

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return (combined - update).contiguous()


@every_memory
def test_a_branch_reads_a_recomputed_stream_in_the_memory_layout_of_its_first_run(memory: str) -> None:
    branches = [Strided(nn.Linear(6, 6).double()) for _ in range(6)]
    blocks = [rg.two_stream(f, g, coupling=Transposing()) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    loss_of((rg.ReversibleSequence(blocks, memory=memory_of(memory, 3))(sample(4, 6)),)).backward()
    strides = [branch.strides for branch in branches]
    assert len({stride for seen in strides for stride in seen}) == 2
    assert all(len(set(seen)) == 1 for seen in strides)


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
