"""An encoder-decoder for sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.ready_made import two_stream
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence

from ._attention import CrossAttention, Sees, SelfAttention
from ._cache import KVCache, Sampling, continued, evaluating, positions_of
from ._chunked import chunked_cross_entropy
from ._depth import shrink_updates
from ._feed_forward import FeedForward
from ._hub import HubModel
from ._positions import rotary_angles


class EncoderDecoder(HubModel):
    """A reversible transformer that reads one sequence and writes another.

    Vaswani et al.: "Attention Is All You Need" (2017), with the reversible streams of Kitaev et al.: "Reformer"
    (2020). A decoder block has three steps, each of which reads the stream that the step before it updated:
    `0 += attention(1)`, `1 += cross_attention(0, encoded)`, `0 += feed_forward(1)`; then the streams swap roles. The
    encoder's output is context, and gets its gradient from all blocks of the decoder.

    Args:
        source_vocabulary, target_vocabulary: the numbers of different tokens read and written.
        width, depth, heads: of the streams, the blocks of encoder and of decoder, the heads of each attention.
        kv_heads: the heads of keys and values; `heads` unless fewer are given.
        dropout: on the updates of all branches.
        loss_chunk: the number of tokens whose logits the loss holds at once.
        memory: as in `ReversibleSequence`, for encoder and decoder.

    Examples:
        >>> import torch
        >>> from retrograde.models import EncoderDecoder
        >>> model = EncoderDecoder(50, 60, width=32, depth=2, heads=4)
        >>> source, target = torch.randint(50, (2, 9)), torch.randint(60, (2, 7))
        >>> model(source, target).shape
        torch.Size([2, 7, 60])
        >>> model.loss(source, target).backward()
        >>> model.generate(source, target[:, :1], steps=5, temperature=0).shape
        torch.Size([2, 6])
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        width: int = 256,
        depth: int = 6,
        heads: int = 8,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        loss_chunk: int = 1024,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        self.head_width, self.loss_chunk = width // heads, loss_chunk
        self.read, self.write = nn.Embedding(source_vocabulary, width), nn.Embedding(target_vocabulary, width)
        for embedding in (self.read, self.write):
            nn.init.normal_(embedding.weight, std=0.02)

        def attention(sees: Sees) -> SelfAttention:
            return SelfAttention(width, heads, kv_heads, sees=sees, dropout=dropout)

        encoder = [two_stream(attention("all"), FeedForward(width, dropout=dropout)) for _ in range(depth)]
        decoder = [
            Block(
                Step(attention("past"), target=0, sources=(1,)),
                Step(CrossAttention(width, heads, kv_heads, dropout=dropout), target=1, sources=(0,)),
                Step(FeedForward(width, dropout=dropout), target=0, sources=(1,)),
                order=(1, 0),
            )
            for _ in range(depth)
        ]
        self.encoder = shrink_updates(ReversibleSequence(encoder, memory=memory))
        self.decoder = shrink_updates(ReversibleSequence(decoder, memory=memory))
        self.norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """The logits of the token after each of `target`, `(batch, length, target_vocabulary)`.

        Args:
            source_mask: `(batch, source length)`, True where there is a token.
        """
        return self._logits(self.decode(target, self.encode(source, source_mask), source_mask))

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        rotary = rotary_angles(positions_of(source), self.head_width)
        encoded: Tensor = self.encoder(self.read(source), rotary=rotary, mask=source_mask)
        return encoded

    def decode(
        self,
        target: Tensor,
        encoded: Tensor,
        source_mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The last hidden states of the decoder; with a cache, `target` are the tokens after those it has seen."""
        rotary = rotary_angles(positions_of(target, cache), self.head_width)
        context = {"context": encoded, "context_mask": source_mask, "rotary": rotary, "cache": cache}
        hidden: Tensor = self.norm(self.decoder(self.write(target), **context))
        if cache is not None:
            cache.advance(target.shape[-1])
        return hidden

    def loss(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """The mean cross-entropy of each token of `target` but the first, given those before it."""
        hidden = self.decode(target[:, :-1], self.encode(source, source_mask), source_mask)
        return chunked_cross_entropy(hidden, self.write.weight, target[:, 1:], chunk_size=self.loss_chunk)

    def generate(
        self,
        source: Tensor,
        start: Tensor,
        steps: int,
        source_mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`start` (batch, length) and `steps` more tokens; temperature 0 takes the likeliest."""
        cache, sampling = KVCache(), Sampling(temperature, top_k, generator)
        with evaluating(self):
            encoded = self.encode(source, source_mask)

            def logits(new: Tensor) -> Tensor:
                return self._logits(self.decode(new, encoded, source_mask, cache=cache)[:, -1])

            return continued(start, steps, logits, sampling)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.write.weight)
