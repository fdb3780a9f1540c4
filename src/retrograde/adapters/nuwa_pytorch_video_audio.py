"""The drop-in for `nuwa_pytorch.reversible_video_audio` (nuwa-pytorch 0.7.8): two modalities, two streams each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from retrograde.sequence import ReversibleSequence as EngineSequence

from ._dropin import Branch, PublishedBlock, branches_of, copied_into, second_half
from ._dropin import Deterministic as Deterministic

VIDEO, VIDEO_MEMORY, AUDIO, AUDIO_MEMORY = range(4)
Lengths = tuple[int, int]


class Wiring(NamedTuple):
    """One step: its branch, the streams it updates and reads, and its arguments by their names in the call."""

    letter: str
    target: int
    sources: tuple[int, ...]
    takes: dict[str, str]
    whole: tuple[int, ...] = ()
    """Sources that the published code reads from a tensor of their own, not from half of a doubled one."""


class _ModalBranch(Branch):
    """A branch that reads one or two streams. In the first block they are parts of one tensor, video before audio."""

    def __init__(self, wiring: Wiring, *, first: bool) -> None:
        super().__init__(wiring.letter, wiring.target, wiring.sources)
        self.wiring, self.first = wiring, first

    def __call__(self, *sources: Tensor, kwargs: dict[str, Any], lengths: Lengths) -> Any:
        streams = zip(self.sources, sources, strict=True)
        inputs = [x if stream in self.wiring.whole else self._half(x, stream, lengths) for stream, x in streams]
        return self.module(*inputs, **{parameter: kwargs[name] for parameter, name in self.wiring.takes.items()})

    def _half(self, x: Tensor, stream: int, lengths: Lengths) -> Tensor:
        if not self.first:
            return second_half(x, 2)
        batch, _, width = x.shape
        storage = torch.empty((batch, sum(lengths), 2 * width), dtype=x.dtype, device=x.device)
        return copied_into(storage, x, (1, 0 if stream == VIDEO_MEMORY else lengths[0]), (2, width))


class _FourBranchBlock(PublishedBlock):
    """Four branches; callers pass video attention, video feed-forward, audio attention, audio feed-forward."""

    wirings: ClassVar[tuple[Wiring, ...]]

    def __init__(self, f: nn.Module, g: nn.Module, j: nn.Module, k: nn.Module, *, first: bool = False) -> None:
        super().__init__(*(_ModalBranch(wiring, first=first) for wiring in self.wirings), f=f, g=g, j=j, k=k)


class ReversibleSelfAttnBlock(_FourBranchBlock):
    """Each modality attends to itself."""

    wirings = (
        Wiring("f", VIDEO, (VIDEO_MEMORY,), {}),
        Wiring("g", VIDEO_MEMORY, (VIDEO,), {}, whole=(VIDEO,)),
        Wiring("j", AUDIO, (AUDIO_MEMORY,), {}),
        Wiring("k", AUDIO_MEMORY, (AUDIO,), {}, whole=(AUDIO,)),
    )


_CONTEXT = {"context": "context", "context_mask": "context_mask"}


class ReversibleCrossAttnBlock(_FourBranchBlock):
    """Each modality attends to the context."""

    wirings = (
        Wiring("f", VIDEO, (VIDEO_MEMORY,), {**_CONTEXT, "mask": "video_mask"}),
        Wiring("g", VIDEO_MEMORY, (VIDEO,), {}, whole=(VIDEO,)),
        Wiring("j", AUDIO, (AUDIO_MEMORY,), {**_CONTEXT, "mask": "audio_mask"}),
        Wiring("k", AUDIO_MEMORY, (AUDIO,), {}, whole=(AUDIO,)),
    )


class ReversibleCrossModalityAttnBlock(_FourBranchBlock):
    """The modalities attend to each other. As published, k runs on video and g on audio."""

    wirings = (
        Wiring("f", VIDEO, (VIDEO_MEMORY, AUDIO_MEMORY), {"mask": "video_mask", "context_mask": "audio_mask"}),
        Wiring("k", VIDEO_MEMORY, (VIDEO,), {}, whole=(VIDEO,)),
        Wiring(
            "j",
            AUDIO,
            (AUDIO_MEMORY, VIDEO_MEMORY),
            {"mask": "audio_mask", "context_mask": "video_mask"},
            whole=(VIDEO_MEMORY,),
        ),
        Wiring("g", AUDIO_MEMORY, (AUDIO,), {}, whole=(AUDIO,)),
    )


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
            raise ValueError(
                f"block_types has {len(block_types)} entries for {len(blocks)} blocks; give one per block."
            )
        for i, kind in enumerate(block_types):
            if kind not in BLOCKS:
                expected = ", ".join(map(repr, BLOCKS))
                raise ValueError(f"Block {i}: unknown layer type {kind!r}; expected one of {expected}.")
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
        _check_mask("video_mask", video_mask, video)
        _check_mask("audio_mask", audio_mask, audio)
        _check_mask("context_mask", context_mask, context)
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
    """Raise unless a mask covers batch and length of its tensor, or its length for the whole batch."""
    if mask is None or covered is None:
        return
    batch, length = covered.shape[:2]
    if tuple(mask.shape) not in ((batch, length), (1, length)):
        what = name.removesuffix("_mask")
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, but {what} of shape {tuple(covered.shape)} needs {(batch, length)}."
        )
