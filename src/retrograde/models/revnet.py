"""A reversible residual network for images."""

from __future__ import annotations

from collections.abc import Sequence

from retrograde.memory import Memory
from retrograde.network.block import Block
from retrograde.network.ready_made import two_stream

from ._convolution import Convolutions, StagedClassifier


class RevNet(StagedClassifier):
    """A ResNet that is reversible within each stage; the transition between two stages is checkpointed.

    Gomez, Ren, Urtasun, Grosse: "The Reversible Residual Network: Backpropagation Without Storing Activations"
    (2017). The channels are cut into two streams; each block adds the branch of one to the other, and back.

    Args:
        classes: the number of outputs.
        widths, depths: the channels and the blocks of each stage; an image's sides are halved between stages.
        channels: of the images.
        memory: as in `ReversibleSequence`; with "reverse", transitions are checkpointed. In a list, a transition
            is a block of its own.

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
        memory: Memory = "reverse",
    ) -> None:
        if any(width % 2 for width in widths):
            raise ValueError(f"widths={tuple(widths)}: each is cut into two streams, so it must be even.")

        def block(width: int) -> Block:
            return two_stream(Convolutions(width), Convolutions(width))

        super().__init__(classes, channels, widths, depths, block, merge="concat", memory=memory)
