"""The models of the reproductions: a character model and an image classifier, reversible or residual.

Both kinds consist of the same branches, so a reversible model and its residual twin have the same
parameters and the same number of multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg

Pairs: TypeAlias = list[tuple[nn.Module, nn.Module]]
MakeStack: TypeAlias = Callable[[Pairs], nn.Module]


class Attention(nn.Module):
    """Pre-norm self-attention."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FeedForward(nn.Sequential):
    """Pre-norm GELU feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Convolution(nn.Sequential):
    """Batch norm, ReLU, 3×3."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))


def transformer(width: int, depth: int, *, heads: int = 4, causal: bool = False) -> Pairs:
    """The branches of `depth` transformer blocks."""
    return [(Attention(width, heads, causal=causal), FeedForward(width)) for _ in range(depth)]


def reversible(dim: int = -1, **options: Any) -> MakeStack:
    """Two streams; `options` are those of `ReversibleSequence`."""
    return lambda pairs: rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], dim=dim, **options)


class Residual(nn.Module):
    """The ordinary network of the same branches: one stream, to which each branch adds."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branch for pair in pairs for branch in pair)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return x


class CharacterModel(nn.Module):
    """Embedding, causal transformer blocks, and the next character's logits."""

    def __init__(self, characters: int, length: int, width: int, depth: int, make_stack: MakeStack) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.stack = make_stack(transformer(width, depth, causal=True))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, numbers: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stack(self.embedding(numbers) + self.position))
        return logits


class ImageClassifier(nn.Module):
    """A RevNet of one stage: stem, blocks of batch-normalised convolutions, mean over the image."""

    def __init__(self, classes: int, width: int, depth: int, make_stack: MakeStack) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.stack = make_stack([(Convolution(width), Convolution(width)) for _ in range(depth)])
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.stack(self.stem(images))).relu().mean((2, 3)))
        return logits
