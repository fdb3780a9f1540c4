"""A reversible vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retrograde.memory import Memory
from retrograde.network.ready_made import two_stream
from retrograde.sequence import ReversibleSequence

from ._attention import SelfAttention
from ._depth import embedded, shrink_updates
from ._feed_forward import FeedForward
from ._hub import HubModel


class RevViT(HubModel):
    """A vision transformer on two streams, which are concatenated at the end and classified together.

    Mangalam et al.: "Reversible Vision Transformers" (2022).

    Args:
        classes: the number of outputs.
        size: the side of the square images.
        patch: the side of the square patches that are the tokens.
        width, depth, heads: of the streams, the number of blocks, the heads of each attention.
        channels: of the images.
        dropout: on the updates of all branches.
        layer_drop: the probability with which a block is dropped in training (stochastic depth).
        memory: as in `ReversibleSequence`.

    Examples:
        >>> import torch
        >>> from retrograde.models import RevViT
        >>> model = RevViT(classes=10, size=16, patch=4, width=32, depth=3, heads=4)
        >>> model(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int,
        size: int = 224,
        patch: int = 16,
        *,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        channels: int = 3,
        dropout: float = 0.0,
        layer_drop: float = 0.0,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"Images of {size}×{size} cannot be cut into patches of {patch}×{patch}.")
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        blocks = [
            two_stream(SelfAttention(width, heads, dropout=dropout), FeedForward(width, dropout=dropout))
            for _ in range(depth)
        ]
        stack = ReversibleSequence(blocks, merge="concat", memory=memory, layer_drop=layer_drop)
        self.stack = shrink_updates(stack)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, size, size)` to the logits `(batch, classes)`."""
        tokens = embedded(images, self.embed).flatten(2).transpose(1, 2)
        if tokens.shape[1:] != self.places.shape:
            raise ValueError(
                f"Images of shape {tuple(images.shape)} give {tokens.shape[1]} patches; the model was made for "
                f"{len(self.places)}. Resize the images, or build it with another size."
            )
        logits: Tensor = self.head(self.norm(self.stack(tokens + self.places)).mean(1))
        return logits
