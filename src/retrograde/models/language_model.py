"""A decoder-only language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.memory import Memory
from retrograde.network.ready_made import two_stream
from retrograde.sequence import ReversibleSequence

from ._attention import SelfAttention
from ._cache import KVCache, Sampling, continued, evaluating, positions_of
from ._chunked import chunked_cross_entropy
from ._depth import shrink_updates
from ._feed_forward import FeedForward
from ._hub import HubModel
from ._positions import rotary_angles


class ReversibleLM(HubModel):
    """A reversible transformer language model: rotary positions, grouped-query attention, tied embeddings.

    Kitaev, Kaiser, Levskaya: "Reformer: The Efficient Transformer" (2020), for the two streams of attention and
    feed-forward; Su et al.: "RoFormer" (2021); Ainslie et al.: "GQA" (2023).

    Args:
        vocabulary: the number of different tokens.
        width, depth, heads: of the streams, the number of blocks, and the heads of each attention.
        kv_heads: the heads of keys and values; `heads` unless fewer are given.
        hidden: the inner width of the feed-forward, four times the width by default.
        dropout: on the updates of all branches.
        feed_forward_chunks: into how many chunks of tokens a feed-forward cuts its input.
        loss_chunk: the number of tokens whose logits the loss holds at once.
        memory, exact, grid_bits: as in `ReversibleSequence`.

    Examples:
        >>> import torch
        >>> from retrograde.models import ReversibleLM
        >>> model = ReversibleLM(vocabulary=100, width=32, depth=4, heads=4, kv_heads=2)
        >>> tokens = torch.randint(100, (2, 16))
        >>> model(tokens).shape
        torch.Size([2, 16, 100])
        >>> model.loss(tokens).backward()
        >>> model.generate(tokens[:, :4], steps=8, top_k=10).shape
        torch.Size([2, 12])
    """

    def __init__(
        self,
        vocabulary: int,
        width: int = 256,
        depth: int = 12,
        heads: int = 8,
        kv_heads: int | None = None,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        feed_forward_chunks: int = 1,
        loss_chunk: int = 1024,
        memory: Memory = "reverse",
        exact: bool = False,
        grid_bits: int | None = None,
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.loss_chunk = loss_chunk
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        blocks = [
            two_stream(
                SelfAttention(width, heads, kv_heads, sees="past", dropout=dropout),
                FeedForward(width, hidden, dropout=dropout, chunks=feed_forward_chunks),
            )
            for _ in range(depth)
        ]
        self.stack = shrink_updates(ReversibleSequence(blocks, memory=memory, exact=exact, grid_bits=grid_bits))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """The logits of the next token at each position: `(batch, length)` to `(batch, length, vocabulary)`."""
        return self._logits(self.hidden(tokens, cache=cache))

    def hidden(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """The last hidden states, `(batch, length, width)`.

        Args:
            cache: keys and values of earlier tokens, in generation; `tokens` are those after them.
        """
        rotary = rotary_angles(positions_of(tokens, cache), self.head_width)
        hidden: Tensor = self.norm(self.stack(self.embed(tokens), rotary=rotary, cache=cache))
        if cache is not None:
            cache.advance(tokens.shape[-1])
        return hidden

    def loss(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy of each next token, or of the `targets` given (-100 is ignored)."""
        if targets is None:
            tokens, targets = tokens[:, :-1], tokens[:, 1:]
        return chunked_cross_entropy(self.hidden(tokens), self.embed.weight, targets, chunk_size=self.loss_chunk)

    def generate(
        self,
        prompt: Tensor,
        steps: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompt `(batch, length)` and `steps` more tokens, sampled one by one; temperature 0 takes the likeliest.

        Keys and values are cached, so that each step runs the model on one token.
        """
        cache, sampling = KVCache(), Sampling(temperature, top_k, generator)
        with evaluating(self):
            return continued(prompt, steps, lambda new: self._logits(self.hidden(new, cache=cache)[:, -1]), sampling)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.weight)
