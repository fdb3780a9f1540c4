"""Points in space, with edges between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retrograde.memory import Memory
from retrograde.network.ready_made import two_stream
from retrograde.sequence import ReversibleSequence

from ._attention import Attention
from ._depth import embedded, shrink_updates
from ._feed_forward import FeedForward
from ._hub import HubModel


class PointAttention(Attention):
    """Attention that weighs points by their values, their distance, and the edge between them."""

    def __init__(self, width: int, heads: int, edge_features: int, *, reach: float, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.reach, self.waves = reach, 16
        self.weigh = nn.Sequential(
            nn.Linear(self.waves + edge_features, width), nn.SiLU(), nn.Linear(width, heads, bias=False)
        )

    def forward(self, x: Tensor, coords: Tensor, mask: Tensor | None = None, edges: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        pairs = self._distances(coords)
        if edges is not None:
            pairs = torch.cat([pairs, edges.to(pairs.dtype)], -1)
        weights: Tensor = self.weigh(pairs).movedim(-1, 1)
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None, None], float("-inf"))
        queries = self.queries(x)
        keys, values = self.keys_values(x)
        return self.attend(queries, keys, values, weights.to(queries.dtype))

    def _distances(self, coords: Tensor) -> Tensor:
        """The distances between points in radial basis functions up to the reach: `(batch, points, points, waves)`."""
        squares = (coords[:, :, None] - coords[:, None]).square().sum(-1)
        distances = (squares + 1e-6).sqrt()  # the constant keeps the gradient of a point's distance to itself finite
        centres = torch.linspace(0, self.reach, self.waves, device=coords.device, dtype=coords.dtype)
        return torch.exp(-((distances[..., None] - centres) * (self.waves / self.reach)).square() / 2)


class PointCloudTransformer(HubModel):
    """A reversible transformer over points: their values are the streams, coordinates and edges are context.

    Hutchinson et al.: "LieTransformer: Equivariant Self-Attention for Lie Groups" (2021), for attention that weighs
    content and location, here by distances only, as in Schütt et al.: "SchNet" (2017). So the output does not
    change when the points are rotated, mirrored or moved, and is permuted as they are. Gradients reach coordinates
    and edges.

    Args:
        features, outputs: the number of input and output values per point.
        edge_features: the number of values per pair of points.
        width, depth, heads: of the streams, the number of blocks, the heads of each attention.
        reach: the distance above which all distances look the same.
        dropout: on the updates of all branches.
        memory: as in `ReversibleSequence`.

    Examples:
        >>> import torch
        >>> from retrograde.models import PointCloudTransformer
        >>> model = PointCloudTransformer(features=4, outputs=1, edge_features=2, width=16, depth=2, heads=2)
        >>> values, coords, edges = torch.randn(3, 7, 4), torch.randn(3, 7, 3), torch.randn(3, 7, 7, 2)
        >>> model(values, coords, edges=edges).shape
        torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        features: int,
        outputs: int,
        edge_features: int = 0,
        *,
        width: int = 128,
        depth: int = 6,
        heads: int = 8,
        reach: float = 5.0,
        dropout: float = 0.0,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        self.edge_features = edge_features
        self.embed = nn.Linear(features, width)
        blocks = [
            two_stream(
                PointAttention(width, heads, edge_features, reach=reach, dropout=dropout),
                FeedForward(width, dropout=dropout),
            )
            for _ in range(depth)
        ]
        self.stack = shrink_updates(ReversibleSequence(blocks, memory=memory))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(
        self, values: Tensor, coords: Tensor, mask: Tensor | None = None, edges: Tensor | None = None
    ) -> Tensor:
        """The outputs of each point, `(batch, points, outputs)`.

        Args:
            values: `(batch, points, features)`.
            coords: `(batch, points, dimensions)`.
            mask: `(batch, points)`, True where there is a point.
            edges: `(batch, points, points, edge_features)`.
        """
        given = 0 if edges is None else edges.shape[-1]
        if given != self.edge_features:
            raise ValueError(f"The model was made for {self.edge_features} edge features, but {given} were given.")
        output: Tensor = self.head(self.stack(embedded(values, self.embed), coords=coords, mask=mask, edges=edges))
        return output
