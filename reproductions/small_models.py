"""The models of the reproductions: language models and image classifiers, reversible or residual.

Both kinds consist of the same branches, so a reversible model and its residual twin have the same
parameters and the same number of multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.models._positions import rotary_angles, rotate

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


class RotaryAttention(nn.Module):
    """Attention with RMSNorm, rotary positions and no biases, as in present-day language models."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rotary = rotary_angles(torch.arange(x.shape[1]), q.shape[-1])
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """The feed-forward of the same models: RMSNorm, then a gated SiLU of 8/3 of the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.norm = nn.RMSNorm(width)
        self.widen, self.narrow = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.widen(self.norm(x)).chunk(2, -1)
        out: Tensor = self.narrow(F.silu(gate) * value)
        return out


class Convolution(nn.Sequential):
    """Batch norm, ReLU, 3×3."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))


def transformer(width: int, depth: int, *, heads: int = 4, causal: bool = False) -> Pairs:
    """The branches of `depth` transformer blocks."""
    return [(Attention(width, heads, causal=causal), FeedForward(width)) for _ in range(depth)]


def modern_transformer(width: int, depth: int, *, heads: int = 4, causal: bool = False) -> Pairs:
    """The branches of `depth` transformer blocks with RMSNorm, rotary positions and SwiGLU."""
    return [(RotaryAttention(width, heads, causal=causal), SwiGLU(width)) for _ in range(depth)]


def reversible(dim: int = -1, **options: Any) -> MakeStack:
    """Two streams; `options` are those of `ReversibleSequence`."""
    return lambda pairs: rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], dim=dim, **options)


class Residual(nn.Module):
    """The ordinary network of the same branches: one stream, to which each branch adds.

    Args:
        memory: "checkpoint" keeps the inputs of pairs of branches, by torch's checkpoint.
    """

    def __init__(self, pairs: Pairs, memory: str = "store") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._run(layer, x) if self.memory == "store" else checkpoint(self._run, layer, x, use_reentrant=False)
        return x

    @staticmethod
    def _run(layer: Any, x: Tensor) -> Tensor:
        for branch in layer:
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


class ModernGPT(nn.Module):
    """A pre-norm decoder with RMSNorm, rotary positions and SwiGLU."""

    def __init__(self, characters: int, width: int, depth: int, make_stack: MakeStack) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.stack = make_stack(modern_transformer(width, depth, causal=True))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, characters, bias=False))

    def forward(self, numbers: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stack(self.embedding(numbers)))
        return logits


class ModernViT(nn.Module):
    """A vision transformer of the same branches on patches of 2×2 pixels."""

    def __init__(self, classes: int, width: int, depth: int, make_stack: MakeStack) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.stack = make_stack(modern_transformer(width, depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.norm(self.stack(tokens)).mean(1))
        return logits
