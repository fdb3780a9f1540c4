"""Attention branches: a stream attends to itself, or to other tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._cache import KVCache
from ._positions import Rotary, rotate

Sees = Literal["all", "past"]


class Attention(nn.Module):
    """The base of all attentions: SDPA with grouped queries (Ainslie et al., "GQA", 2023).

    Masks are boolean, `(batch, length)`, and True where there is a token.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if width % heads or heads % self.kv_heads:
            raise ValueError(
                f"A width of {width} must be a multiple of heads={heads}, and heads of kv_heads={self.kv_heads}."
            )
        self.norm = nn.LayerNorm(width)
        self.read = nn.Linear(width, width, bias=False)
        self.read_keys_values = nn.Linear(width, 2 * self.kv_heads * (width // heads), bias=False)
        self.update = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def queries(self, x: Tensor) -> Tensor:
        heads: Tensor = self.read(x).unflatten(-1, (self.heads, -1))
        return heads.transpose(-3, -2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.read_keys_values(x).unflatten(-1, (2, self.kv_heads, -1))
        keys, values = heads.transpose(-4, -2).unbind(-3)
        return keys, values

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, sees: Sees = "all"
    ) -> Tensor:
        """The update of the stream. `mask` is boolean, or a number to be added to each logit."""
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=sees == "past", enable_gqa=self.heads != self.kv_heads
        )
        update: Tensor = self.dropout(self.update(mixed.transpose(-3, -2).flatten(-2)))
        return update


class SelfAttention(Attention):
    """Attention of tokens `(batch, length, width)` to each other, or to those before them."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, sees: Sees = "all", dropout: float = 0.0
    ) -> None:
        super().__init__(width, heads, kv_heads, dropout=dropout)
        self.sees: Sees = sees

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = self.norm(x)
        queries, (keys, values) = self.queries(x), self.keys_values(x)
        if rotary is not None:
            queries, keys = rotate(queries, rotary), rotate(keys, rotary)
        if cache is not None:
            keys, values = cache.extend(self, keys, values)
        allowed = None if mask is None else mask[:, None, None]
        if self.sees == "past" and (allowed is not None or keys.shape[-2] > queries.shape[-2]):
            past = _past(queries, keys)
            allowed = past if allowed is None else allowed & past
        return self.attend(queries, keys, values, allowed, "all" if allowed is not None else self.sees)


class CrossAttention(Attention):
    """Attention of tokens to those of `context`: an encoder's output, or another stream."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, kv_heads, dropout=dropout)
        self.context_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None = None) -> Tensor:
        keys, values = self.keys_values(self.context_norm(context))
        allowed = None if context_mask is None else context_mask[:, None, None]
        return self.attend(self.queries(self.norm(x)), keys, values, allowed)


def _past(queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys each query may see, where the last query and the last key belong to one token."""
    new, every = queries.shape[-2], keys.shape[-2]
    return torch.ones(new, every, dtype=torch.bool, device=queries.device).tril(every - new)
