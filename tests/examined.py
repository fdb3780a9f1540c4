"""Small models for the doctor to examine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

WIDTH = 16


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def stack_of(depth: int, make: Callable[[], Any] = mlp, *, keep: float = 1.0, **options: Any) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(keep=keep) if keep != 1 else None
    return rg.ReversibleSequence([rg.two_stream(make(), mlp(), coupling=coupling) for _ in range(depth)], **options)


def batch(rows: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


class Around(nn.Module):
    """A model around two stacks, one of which it calls twice."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.out = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.out(self.second(self.first(self.first(x * scale))))}
