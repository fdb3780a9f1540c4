"""In the place of `nuwa_pytorch.reversible_video_audio` (nuwa-pytorch 0.7.8): two modalities, two streams each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde._sequence import ReversibleSequence as EngineSequence
from retrograde._step import Step
from ._dropin import Branch, PublishedBlock, branches_of, inside, named
from ._dropin import Deterministic as Deterministic

VIDEO, VIDEO_MEMORY, AUDIO, AUDIO_MEMORY = range(4)
Modality = Literal["video", "audio"]
Lengths = tuple[int, int]


class _ModalBranch(Branch):
    """A branch that reads the memory stream of its own modality first, and perhaps a second source.

    Args:
        own: the modality of the first source.
        takes: the branch's arguments, by their names in the call.
        reads: for each source the modality of the doubled tensor that it is half of, or None.
        first: whether the block is the first, where both modalities share one tensor.
    """

    def __init__(self, letter: str, takes: Mapping[str, str], reads: Sequence[Modality | None], *, first: bool) -> None:
        super().__init__(letter)
        self.takes = dict(takes)
        self.reads = tuple(reads)
        self.first = first

    def __call__(self, *sources: Tensor, kwargs: dict[str, Any], lengths: Lengths) -> Any:
        inputs = [self._laid_out(x, half, lengths) for x, half in zip(sources, self.reads, strict=True)]
        return self.module(*inputs, **{parameter: kwargs[name] for parameter, name in self.takes.items()})

    def _laid_out(self, x: Tensor, half: Modality | None, lengths: Lengths) -> Tensor:
        """As in `second_half`; the first block's halves lie in one tensor with both modalities, video before audio."""
        if half is None:
            return x
        batch, length, width = x.shape
        total, start = (sum(lengths), 0 if half == "video" else lengths[0]) if self.first else (length, 0)
        room = torch.empty((batch, total, 2 * width), dtype=x.dtype, device=x.device)
        return inside(room, x, (1, start), (2, width))


class _FourBranchBlock(PublishedBlock):
    """Two branches for video, f and g, and two for audio, j and k."""

    def __init__(self, f: nn.Module, g: nn.Module, j: nn.Module, k: nn.Module, *, first: bool = False) -> None:
        nets = {"f": f, "g": g, "j": j, "k": k}
        steps = [
            Step(_ModalBranch(letter, takes, reads, first=first), target, sources, name=named(letter, nets[letter]))
            for letter, target, sources, reads, takes in self.wiring()
        ]
        super().__init__(*steps, **nets)

    @staticmethod
    def wiring() -> list[tuple[str, int, tuple[int, ...], tuple[Modality | None, ...], dict[str, str]]]:
        """For each step in order: its branch, target, sources, how they are read, and its arguments."""
        raise NotImplementedError


class ReversibleSelfAttnBlock(_FourBranchBlock):
    """Each modality attends to itself."""

    @staticmethod
    def wiring() -> list[tuple[str, int, tuple[int, ...], tuple[Modality | None, ...], dict[str, str]]]:
        return [
            ("f", VIDEO, (VIDEO_MEMORY,), ("video",), {}),
            ("g", VIDEO_MEMORY, (VIDEO,), (None,), {}),
            ("j", AUDIO, (AUDIO_MEMORY,), ("audio",), {}),
            ("k", AUDIO_MEMORY, (AUDIO,), (None,), {}),
        ]


class ReversibleCrossAttnBlock(_FourBranchBlock):
    """Each modality attends to the context."""

    @staticmethod
    def wiring() -> list[tuple[str, int, tuple[int, ...], tuple[Modality | None, ...], dict[str, str]]]:
        context = {"context": "context", "context_mask": "context_mask"}
        return [
            ("f", VIDEO, (VIDEO_MEMORY,), ("video",), {**context, "mask": "video_mask"}),
            ("g", VIDEO_MEMORY, (VIDEO,), (None,), {}),
            ("j", AUDIO, (AUDIO_MEMORY,), ("audio",), {**context, "mask": "audio_mask"}),
            ("k", AUDIO_MEMORY, (AUDIO,), (None,), {}),
        ]


class ReversibleCrossModalityAttnBlock(_FourBranchBlock):
    """The modalities attend to each other. As published, k runs on video and g on audio."""

    @staticmethod
    def wiring() -> list[tuple[str, int, tuple[int, ...], tuple[Modality | None, ...], dict[str, str]]]:
        to_audio = {"mask": "video_mask", "context_mask": "audio_mask"}
        to_video = {"mask": "audio_mask", "context_mask": "video_mask"}
        return [
            ("f", VIDEO, (VIDEO_MEMORY, AUDIO_MEMORY), ("video", "audio"), to_audio),
            ("k", VIDEO_MEMORY, (VIDEO,), (None,), {}),
            ("j", AUDIO, (AUDIO_MEMORY, VIDEO_MEMORY), ("audio", None), to_video),
            ("g", AUDIO_MEMORY, (AUDIO,), (None,), {}),
        ]


BLOCKS: dict[str, type[_FourBranchBlock]] = {
    "intra_modality_self_attn": ReversibleSelfAttnBlock,
    "intra_modality_cross_attn": ReversibleCrossAttnBlock,
    "inter_modality_cross_attn": ReversibleCrossModalityAttnBlock,
}


class DualModalityReversibleSequence(EngineSequence):
    """`(video, audio, *, context, masks, reverse)` → `[video, audio]`, each the mean of its streams.

    `reverse=False` stores the activations for this call.
    """

    def __init__(self, input_blocks: Iterable[Any], block_types: Sequence[str]) -> None:
        blocks = branches_of(input_blocks, "fgjk")
        if len(block_types) != len(blocks):
            raise ValueError(f"block_types has {len(block_types)} entries for {len(blocks)} blocks; give one a block.")
        for i, kind in enumerate(block_types):
            if kind not in BLOCKS:
                known = ", ".join(map(repr, BLOCKS))
                raise ValueError(f"Block {i}: unknown layer type {kind!r}; expected one of {known}.")
        super().__init__(
            [BLOCKS[kind](*nets, first=i == 0) for i, (kind, nets) in enumerate(zip(block_types, blocks, strict=True))],
            merge=None,
        )
        self.block_types = block_types

    def forward(  # type: ignore[override]
        self,
        video: Tensor,
        audio: Tensor,
        *,
        context: Tensor | None,
        context_mask: Tensor | None = None,
        video_mask: Tensor | None = None,
        audio_mask: Tensor | None = None,
        reverse: bool = True,
    ) -> list[Tensor]:
        for name, mask, covered in (
            ("video_mask", video_mask, video),
            ("audio_mask", audio_mask, audio),
            ("context_mask", context_mask, context),
        ):
            _check_mask(name, mask, covered)
        kwargs = {
            "context": context, "context_mask": context_mask, "video_mask": video_mask, "audio_mask": audio_mask,
        }  # fmt: skip
        outputs = self.run(
            (video, video, audio, audio),
            memory=None if reverse else "store",
            kwargs=kwargs,
            lengths=(video.shape[1], audio.shape[1]),
        )
        return [torch.stack(pair, dim=2).mean(dim=2) for pair in (outputs[:AUDIO], outputs[AUDIO:])]


def _check_mask(name: str, mask: Tensor | None, covered: Tensor | None) -> None:
    """A mask covers batch and length of its tensor, or all of the batch alike."""
    if mask is None or covered is None:
        return
    batch, length = covered.shape[:2]
    if tuple(mask.shape) not in ((batch, length), (1, length)):
        what = name.removesuffix("_mask")
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, but {what} of shape {tuple(covered.shape)} needs {(batch, length)}."
        )
