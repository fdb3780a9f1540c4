"""Comparing runs bit for bit: everything that a training call leaves behind, with stored activations and without."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes: it tells 0.0 from -0.0, and one NaN from another."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def loss_of(y: Tensor) -> Tensor:
    """A loss in which every entry has its own gradient."""
    return (y.float().sin() * y.float()).sum()


def observed(
    stack: rg.ReversibleSequence,
    x: Tensor,
    *,
    memory: Any = None,
    autocast: bool = False,
    loss: Callable[[Any], Tensor] = loss_of,
    **context: Any,
) -> dict[str, Tensor]:
    """What a training call of a copy of the stack gives: its output, every gradient, buffers and the generator."""
    stack = copy.deepcopy(stack)
    x = x.detach().requires_grad_()
    context = {k: v.detach().requires_grad_() if v.is_floating_point() else v for k, v in context.items()}
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = stack(x, memory=memory, **context)
    loss(y).backward()
    seen = {"output": y if isinstance(y, Tensor) else y[0], "gradient of the input": x.grad}
    seen |= {f"gradient of {name}": value.grad for name, value in context.items() if value.is_floating_point()}
    seen |= {f"gradient of {name}": p.grad for name, p in stack.named_parameters()}
    seen |= {f"buffer {name}": b for name, b in stack.named_buffers()}
    return {**seen, "generator": torch.get_rng_state()}


def assert_same_bits(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    assert any(value is not None and value.any() for name, value in wanted.items() if "gradient" in name)
    differ = [name for name, value in wanted.items() if _digest(found[name]) != _digest(value)]
    assert not differ, f"{len(differ)} of {len(wanted)} differ: {differ[:6]}"


def _digest(tensor: Tensor | None) -> str | None:
    return None if tensor is None else digest(tensor)


def as_stored(stack: rg.ReversibleSequence, x: Tensor, *, memory: Any = "reverse", **options: Any) -> None:
    """Assert that recomputed activations give the bits that stored ones give."""
    assert_same_bits(observed(stack, x, memory=memory, **options), observed(stack, x, memory="store", **options))


def differing(stack: rg.ReversibleSequence, x: Tensor, **options: Any) -> int:
    """How many tensors differ in their bits between recomputed and stored activations."""
    found, wanted = observed(stack, x, memory="reverse", **options), observed(stack, x, memory="store", **options)
    return sum(_digest(found[name]) != _digest(value) for name, value in wanted.items())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mlp(width: int = 16, *, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, width))


class Attention(nn.Module):
    """Causal attention with dropout inside."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=0.1)
        return mixed.transpose(1, 2).flatten(-2)


class CrossAttention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        return self.attend(x, encoded, encoded, key_padding_mask=mask, need_weights=False)[0]


class Normed(nn.Module):
    """Batch statistics over all positions, which change a buffer in every call."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2).relu()


class Convolution(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x.transpose(1, 2)).transpose(1, 2).tanh()


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: mlp(dropout=0.3),
    "batch norm": Normed,
    "attention": Attention,
    "convolution": Convolution,
}


def stack_of(branch: Callable[[], nn.Module] = mlp, depth: int = 6, **options: Any) -> rg.ReversibleSequence:
    """An exact stack of two fresh branches a block."""
    compute = options.pop("compute", None)
    blocks = [rg.two_stream(branch(), branch(), compute=compute) for _ in range(depth)]
    return rg.ReversibleSequence(blocks, **{"exact": True, **options})
