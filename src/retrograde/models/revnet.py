"""A reversible residual network for images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from retrograde._block import two_stream

from ._convolution import Classifier, Convolutions, Shrink, stages
from ._depth import MemoryChoice, embedded


class RevNet(nn.Module):
    """A ResNet that is reversible within each stage; the transition between two stages is checkpointed.

    Gomez, Ren, Urtasun, Grosse: "The Reversible Residual Network: Backpropagation Without Storing Activations"
    (2017). The channels are cut into two streams; each block adds the branch of one to the other, and back.

    Args:
        classes: the number of outputs.
        widths, depths: the channels and the blocks of each stage; an image's sides are halved between stages.
        channels: of the images.
        memory: as in `ReversibleSequence`; where it is "reverse", transitions are "checkpoint". A list names
            transitions as blocks of their own.

    Examples:
        >>> import torch
        >>> from retrograde.models import RevNet
        >>> model = RevNet(classes=10, widths=(8, 16), depths=(2, 2))
        >>> model(torch.randn(4, 3, 16, 16)).shape
        torch.Size([4, 10])
        >>> model.stack.memory.memory
        ('reverse', 'reverse', 'checkpoint', 'reverse', 'reverse')
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int] = (32, 64, 112),
        depths: Sequence[int] = (3, 3, 3),
        *,
        channels: int = 3,
        memory: MemoryChoice = "reverse",
    ) -> None:
        super().__init__()
        if any(width % 2 for width in widths):
            raise ValueError(f"widths={tuple(widths)}: each is cut into two streams, so that it must be even.")
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stack = stages(
            [width // 2 for width in widths],
            depths,
            lambda width: two_stream(Convolutions(width), Convolutions(width)),
            Shrink,
            split="chunk",
            merge="concat",
            memory=memory,
        )
        self.head = Classifier(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, channels, height, width)` to the logits `(batch, classes)`."""
        logits: Tensor = self.head(self.stack(embedded(images, self.stem)))
        return logits
