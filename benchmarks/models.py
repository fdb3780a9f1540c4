"""The networks that every contender runs: the same modules, the same weights, the same arithmetic.

A block is `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`; both streams start as x, and their mean is the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Pre-norm self-attention through SDPA."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Sequential):
    """Pre-norm GELU feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Multiply(nn.Module):
    """The cheapest branch there is: what remains is the library's own cost."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


Pairs = list[tuple[nn.Module, nn.Module]]


@dataclass(frozen=True)
class Setting:
    """A size at which contenders are compared."""

    name: str
    kind: str
    depth: int
    width: int
    batch: int
    length: int = 0
    heads: int = 4
    threads: int = 1
    rounds: int = 30

    def build(self) -> tuple[Pairs, Tensor]:
        torch.manual_seed(0)
        if self.kind == "multiply":
            pairs: Pairs = [(Multiply(self.width), Multiply(self.width)) for _ in range(self.depth)]
            return pairs, torch.randn(self.batch, self.width, requires_grad=True)
        pairs = [(Attention(self.width, self.heads), Mlp(self.width)) for _ in range(self.depth)]
        return pairs, torch.randn(self.batch, self.length, self.width, requires_grad=True)


SETTINGS = {
    "large": Setting("large", "transformer", depth=12, width=512, batch=2, length=512, heads=8, threads=2, rounds=7),
    "tiny": Setting("tiny", "transformer", depth=12, width=64, batch=2, length=64),
    "multiply": Setting("multiply", "multiply", depth=48, width=8, batch=2, rounds=60),
}
