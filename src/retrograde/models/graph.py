"""A graph network of a thousand layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.memory import Memory
from retrograde.network.ready_made import grouped
from retrograde.sequence import ReversibleSequence

from ._depth import embedded, shrink_updates
from ._hub import HubModel


class Messages(nn.Module):
    """Norm, ReLU, the mean over the neighbours, and a linear layer of a node and that mean."""

    def __init__(self, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.update = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.norm(x)))
        sources, targets = edge_index
        mean = torch.zeros_like(x).index_add(0, targets, x[sources] * edge_weight.to(x.dtype))
        update: Tensor = self.update(torch.cat([x, mean], -1))
        return update


class DeepGraphNetwork(HubModel):
    """A grouped reversible graph network, trainable at a thousand layers in the memory of one.

    Li, Müller, Ghanem, Koltun: "Training Graph Neural Networks with 1000 Layers" (2021). The features of a node are
    cut into groups; in each layer every group is updated by messages from another one.

    Args:
        features, outputs: the number of input and output values per node.
        width, depth: of all groups together, and the number of layers.
        groups: into how many streams the width is cut.
        dropout: on the input of each branch.
        memory: as in `ReversibleSequence`.

    Examples:
        >>> import torch
        >>> from retrograde.models import DeepGraphNetwork
        >>> model = DeepGraphNetwork(features=3, outputs=2, width=16, depth=100, groups=2)
        >>> ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
        >>> model(torch.randn(6, 3), ring).shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        features: int,
        outputs: int,
        width: int = 64,
        depth: int = 100,
        groups: int = 2,
        *,
        dropout: float = 0.0,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        if width % groups:
            raise ValueError(f"A width of {width} cannot be cut into {groups} equal groups.")
        self.embed = nn.Linear(features, width)
        blocks = [grouped(*(Messages(width // groups, dropout=dropout) for _ in range(groups))) for _ in range(depth)]
        self.stack = shrink_updates(ReversibleSequence(blocks, split="chunk", merge="concat", memory=memory))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, nodes: Tensor, edge_index: Tensor) -> Tensor:
        """`(nodes, features)` to `(nodes, outputs)`.

        Args:
            edge_index: `(2, edges)`, the numbers of the nodes that each edge leads from and to. Give an edge that
                leads both ways twice; several graphs are one with no edges between them.
        """
        targets = edge_index[1]
        degree = targets.new_zeros(len(nodes)).index_add(0, targets, torch.ones_like(targets))
        output: Tensor = self.head(
            self.stack(embedded(nodes, self.embed), edge_index=edge_index, edge_weight=1 / degree[targets, None])
        )
        return output
