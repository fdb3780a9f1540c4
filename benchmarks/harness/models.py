"""The branches that every contender runs: the same modules, the same weights."""

from __future__ import annotations

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
    """The cheapest possible branch: the library's own cost remains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Convolution(nn.Sequential):
    """Norm, ReLU, 3×3. Group norm, since the peers would update the statistics of a batch norm twice."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
