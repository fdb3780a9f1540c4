"""The feed-forward branch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ._chunked import ChunkedFeedForward


class FeedForward(nn.Module):
    """Norm, widen, GELU, narrow.

    Args:
        hidden: the inner width, four times the width by default.
        chunks: run that many chunks of the tokens one after another, so that the inner activations of one chunk
            set the peak; it costs one more run of the branch.
    """

    def __init__(self, width: int, hidden: int | None = None, *, dropout: float = 0.0, chunks: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden or 4 * width)
        self.update = nn.Linear(hidden or 4 * width, width)
        self.dropout = nn.Dropout(dropout)
        # Of a method and not of a module, so that the names of the parameters do not depend on `chunks`.
        self.chunked = ChunkedFeedForward(self._run, chunks, dim=-2) if chunks != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self._run(x) if self.chunked is None else self.chunked(x)
        return update

    def _run(self, x: Tensor) -> Tensor:
        update: Tensor = self.dropout(self.update(F.gelu(self.widen(self.norm(x)))))
        return update
