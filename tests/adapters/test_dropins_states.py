"""Axial, lie, and video with audio: streams, outputs, masks, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retrograde.adapters import (
    axial_attention,
    lie_transformer_pytorch,
    nuwa_pytorch_video_audio,
)
from systems import KINDS, WIDTH, Mix, Spatial, Spy, doubled, halves, pairs, spies, streams


@pytest.mark.parametrize("route", [(True, True), (True, False), (False, True), (False, False)])
def test_axial_routes_the_arguments_of_a_call_together(route: tuple[bool, bool]) -> None:
    blocks = spies(2, make=lambda: Spy(dim=1))
    module = axial_attention.ReversibleSequence(blocks)
    module(torch.randn(2, WIDTH, 3, dtype=torch.float64), arg_route=route, kv=1)
    assert [bool(branch.calls[0]) for branch in blocks[1]] == list(route)


LAYOUTS = [
    *(((2, WIDTH, 3, 4, 2)[:rank], torch.contiguous_format) for rank in (2, 3, 4, 5)),
    ((2, WIDTH, 3, 4), torch.channels_last),
]


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
def test_axial_doubles_the_channels_of_any_rank(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    blocks = pairs(2, make=lambda: Mix(dim=1, dropout=0.0))
    x = torch.randn(*shape).to(memory_format=layout)
    output = axial_attention.ReversibleSequence(blocks)(x)
    expected = doubled(blocks, torch.cat((x, x), dim=1), 1)
    assert torch.equal(output, halves(expected, 1).mean(dim=0))
    block = axial_attention.IrreversibleBlock(*blocks[0])
    assert torch.equal(block(torch.cat((x, x), dim=1), {}, {}), doubled(blocks[:1], torch.cat((x, x), dim=1), 1))
    assert next(iter(block.state_dict())) == "f.linear.weight"


def test_axial_refuses_an_input_without_channels() -> None:
    with pytest.raises(ValueError, match=r"shape \(7,\) has no channels"):
        axial_attention.ReversibleSequence(pairs(1))(torch.randn(WIDTH))


@pytest.mark.parametrize("edges", [None, torch.randn(2, 3, 3, 2)])
def test_lie_returns_everything_except_the_values_unchanged(edges: Tensor | None) -> None:
    module = lie_transformer_pytorch.ReversibleSequence(pairs(2, make=Spatial))
    state = (torch.randn(2, 3, 3, 6), torch.randn(2, 3, WIDTH), torch.ones(2, 3).bool(), edges)
    out = module(state)
    assert isinstance(out, tuple)
    assert [a is b for a, b in zip(out, state, strict=True)] == [True, False, True, True]
    with pytest.raises(ValueError, match="not one of 3 entries"):
        module(state[:3])


def test_lie_without_reversing_is_the_published_residual_loop() -> None:
    blocks = pairs(2, make=Spatial)
    module = lie_transformer_pytorch.SequentialSequence(blocks).eval()
    assert next(iter(module.state_dict())) == "blocks.0.0.linear.weight"
    coords, values, mask = torch.randn(2, 3, 3, 6), torch.randn(2, 3, WIDTH), torch.ones(2, 3).bool()
    out = module((coords, values, mask, None))
    for pair in blocks:
        for branch in pair:
            values = branch((coords, values, mask, None))[1] + values
    assert torch.equal(out[1], values)


def dual(kinds: Any, count: int = 4) -> Any:
    return nuwa_pytorch_video_audio.DualModalityReversibleSequence(spies(len(kinds), count), kinds)


def test_video_audio_passes_each_kind_of_block_its_masks() -> None:
    module = dual(KINDS)
    masks = {"video_mask": torch.ones(2, 5).bool(), "audio_mask": torch.ones(2, 3).bool()}
    module(streams(2, 5), streams(2, 3), context=streams(2, 4), context_mask=torch.ones(2, 4).bool(), **masks)
    lengths = [
        {
            letter: {key: None if value is None else value.shape[1] for key, value in call.items()}
            for letter in "fgjk"
            for call in getattr(block, letter).net.calls
        }
        for block in module.blocks
    ]
    nothing: dict[str, int] = {}
    assert lengths[0] == dict.fromkeys("fgjk", nothing)
    assert lengths[1] == {
        "f": {"context": 4, "context_mask": 4, "mask": 5}, "g": nothing,
        "j": {"context": 4, "context_mask": 4, "mask": 3}, "k": nothing,
    }  # fmt: skip
    assert lengths[2] == {
        "f": {"mask": 5, "context_mask": 3}, "g": nothing, "j": {"mask": 3, "context_mask": 5}, "k": nothing,
    }  # fmt: skip


def test_video_audio_stores_activations_where_a_call_does_not_reverse() -> None:
    for reverse, runs in ((True, [2, 2, 2, 1]), (False, [1, 1, 1, 1])):
        module = dual(KINDS[:1])
        video, audio = module(streams(2, 5), streams(2, 3), context=None, reverse=reverse)
        (video.sum() + audio.sum()).backward()
        assert [len(getattr(module.blocks[0], letter).net.calls) for letter in "fgjk"] == runs


def test_video_audio_refuses_bad_types_and_masks_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"block_types has 1 entries for 2 blocks"):
        nuwa_pytorch_video_audio.DualModalityReversibleSequence(spies(2, 4), KINDS[:1])
    with pytest.raises(ValueError, match=r"Block 1: unknown layer type 'intra'; expected one of 'intra_modality_self"):
        dual([KINDS[0], "intra"])
    module = dual(KINDS)
    good = {"context": streams(2, 4), "video_mask": torch.ones(1, 5).bool()}
    bad = {"video_mask": ((2, 3), (2, 5)), "audio_mask": ((2,), (2, 3)), "context_mask": ((2, 5), (2, 4))}
    for name, (shape, needed) in bad.items():
        with pytest.raises(ValueError, match=rf"{name} has shape .*{shape[0]}.* needs \({needed[0]}, {needed[1]}\)"):
            module(streams(2, 5), streams(2, 3), **{**good, name: torch.ones(*shape).bool()})
    assert not module.blocks[0].f.net.calls
