"""Two modalities that attend to themselves and to each other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.multimodal import Attends, multimodal
from retrograde.sequence import ReversibleSequence

from ._attention import Attention, CrossAttention, SelfAttention
from ._depth import embedded, shrink_updates
from ._feed_forward import FeedForward
from ._hub import HubModel
from ._positions import sinusoids


class TwoModalityTransformer(HubModel):
    """A reversible transformer of two modalities: a block attends within each, the next one between them.

    Lu, Batra, Parikh, Lee: "ViLBERT: Pretraining Task-Agnostic Visiolinguistic Representations for
    Vision-and-Language Tasks" (2019), for the attention to each other; each modality has two streams of its own.

    Args:
        features: the name of each modality, and the number of its features.
        outputs: the number of outputs per token of each modality; by default as many as features.
        width, depth, heads: of the streams, the pairs of blocks, the heads of each attention.
        dropout: on the updates of all branches.
        memory: as in `ReversibleSequence`, for `2 depth` blocks.

    Examples:
        >>> import torch
        >>> from retrograde.models import TwoModalityTransformer
        >>> model = TwoModalityTransformer({"video": 12, "audio": 5}, width=16, depth=2, heads=2)
        >>> out = model({"video": torch.randn(2, 6, 12), "audio": torch.randn(2, 9, 5)})
        >>> out["video"].shape, out["audio"].shape
        (torch.Size([2, 6, 12]), torch.Size([2, 9, 5]))
    """

    def __init__(
        self,
        features: Mapping[str, int],
        outputs: Mapping[str, int] | None = None,
        *,
        width: int = 256,
        depth: int = 6,
        heads: int = 8,
        dropout: float = 0.0,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        outputs = features if outputs is None else outputs
        if len(features) != 2 or set(outputs) != set(features):
            raise ValueError(f"features={dict(features)}, outputs={dict(outputs)}: name the same two modalities.")
        features = dict(sorted(features.items()))  # a model that was saved as JSON is loaded in another order
        self.embed = nn.ModuleDict({name: nn.Linear(size, width) for name, size in features.items()})

        def block(attends: Attends, attention: type[Attention]) -> Block:
            pairs = {
                name: (attention(width, heads, dropout=dropout), FeedForward(width, dropout=dropout))
                for name in features
            }
            return multimodal(attends, **pairs)

        blocks: list[Block] = []
        for _ in range(depth):
            blocks += [block("itself", SelfAttention), block("each other", CrossAttention)]
        self.stack = shrink_updates(ReversibleSequence(blocks, memory=memory))
        self.head = nn.ModuleDict(
            {name: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size)) for name, size in outputs.items()}
        )

    def forward(self, inputs: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Of each modality, `(batch, length, features)` to `(batch, length, outputs)`; lengths may differ.

        Args:
            masks: of one or both modalities, `(batch, length)`, True where there is a token.
        """
        if set(inputs) != set(self.embed) or set(masks or {}) - set(self.embed):
            raise ValueError(
                f"The modalities are {list(self.embed)}, but inputs were given for {list(inputs)} and masks for "
                f"{list(masks or {})}."
            )
        streams = {name: embedded(inputs[name], layer) for name, layer in self.embed.items()}  # type: ignore[arg-type]
        streams = {name: stream + sinusoids(stream) for name, stream in streams.items()}
        outputs = self.stack(streams, **{f"{name}_mask": mask for name, mask in (masks or {}).items()})
        return {name: head(outputs[name]) for name, head in self.head.items()}
