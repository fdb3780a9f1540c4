"""Published models, unmodified, trained for a few steps: the original, on retrograde, and in plain autograd.

In each step all three start from the same weights: a checkpoint that is loaded with strict=True both ways. On
retrograde the loss has the bits of the published forward pass, and every gradient is plain autograd's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models import (
    MODELS,
    axial_image,
    cloud_loss,
    image_loss,
    in_double,
    language_loss,
    lie,
    lie_with_edges,
    nuwa,
    nuwa_video_audio,
    reformer_lm,
    routing_encoder_decoder,
    routing_lm,
    translation_loss,
    video_audio_loss,
    video_loss,
)
from published import Outcome, Twins, compare, distance, run, train
from retrograde.measure import MemoryTracker

pytestmark = pytest.mark.interop

DROP = 0.1
Load = Callable[[str], Twins]


def right(outcomes: list[Outcome]) -> bool:
    """Whether the published gradients, too, were those of plain autograd."""
    return all(not o.error and o.grads["error"] < 1e-10 for o in outcomes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": DROP, "layer_dropout": 0.4},
        {"use_rezero": True},
        {"use_scale_norm": True, "weight_tie": True},
        {"n_local_attn_heads": 2, "shift_tokens": True},
        {"moe_layers": (1, 2)},
        {"pkm_layers": (2,)},
        {"reversible": False, "dropout": DROP, "layer_dropout": 0.4},
    ],
    ids=str,
)
def test_the_routing_transformer_trains_as_in_plain_autograd(twins: Load, options: dict[str, Any]) -> None:
    if not options.get("reversible", True):
        package = twins("routing_transformer")
        models = [routing_lm(p, **options).double() for p in (package.published, package.ours)]
        models[1].load_state_dict(models[0].state_dict(), strict=True)
        losses = []
        for model in models:
            torch.manual_seed(0)
            losses.append(language_loss(model))
        assert torch.equal(*losses)
        return
    trio = twins("routing_transformer").trio(lambda p: routing_lm(p, **options))
    train(trio, language_loss)
    trio.train(False)
    compare(trio, language_loss)


def test_the_routing_encoder_decoder_trains_with_layer_dropout_as_in_plain_autograd(twins: Load) -> None:
    options = {"dropout": DROP, "enc_layer_dropout": 0.3, "dec_layer_dropout": 0.3}
    trio = twins("routing_transformer").trio(lambda p: routing_encoder_decoder(p, **options))
    for model in (trio.theirs, trio.ours, trio.plain):
        model._backward_hooks.clear()  # its k-means hook: see test_interop_faults
    train(trio, translation_loss)


@pytest.mark.parametrize("edges", [False, True], ids=["without edges", "with edges"])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_lie_transformer_trains_as_in_plain_autograd(twins: Load, depth: int, edges: bool) -> None:
    trio = twins("lie_transformer_pytorch").trio(lambda p: (lie_with_edges if edges else lie)(p, depth=depth))
    outcomes = train(trio, cloud_loss)
    if edges and depth > 1:
        assert all("backward through the graph a second time" in o.error for o in outcomes)
    else:
        assert right(outcomes)


def test_the_lie_transformer_gives_coordinates_their_gradient(twins: Load) -> None:
    """From the lifted pairs of points through every attention. The published backward has none for them."""
    trio = twins("lie_transformer_pytorch").trio(lambda p: lie(p, depth=3))
    grads = []
    for model in (trio.theirs, trio.ours, trio.plain):
        torch.manual_seed(0)
        coords = torch.randn(2, 8, 3, dtype=torch.float64).requires_grad_()
        lifted = coords * 1.0
        pairs = torch.sin(lifted.repeat_interleave(2, 1)[:, :, None] - lifted.repeat_interleave(2, 1)[:, None])
        state = (pairs.repeat(1, 1, 1, 2), torch.randn(2, 16, 16, dtype=torch.float64), torch.ones(2, 16).bool(), None)
        try:
            model.net(state)[1].square().mean().backward()
        except RuntimeError:
            assert model is trio.theirs
        grads.append(coords.grad)
    assert grads[0] is None
    torch.testing.assert_close(grads[1], grads[2], rtol=1e-11, atol=0)


@pytest.mark.parametrize("dropout", [0.0, DROP])
def test_nuwa_trains_as_in_plain_autograd(twins: Load, dropout: float) -> None:
    package = twins("nuwa_pytorch")
    with in_double(package):
        trio = package.trio(lambda p: nuwa(p, dropout=dropout))
        assert right(train(trio, lambda m: video_loss(m, cond_dropout_prob=0.0)))
        trio.train(False)
        compare(trio, video_loss)


def test_nuwa_trains_while_it_drops_its_condition(twins: Load) -> None:
    """It edits the text's mask in place after the encoder ran. The published replay sees the edited mask, and is
    right only because masked texts get no gradient. Plain autograd would raise; ours saves a copy.
    """
    package = twins("nuwa_pytorch")
    with in_double(package):
        assert right(train(package.trio(nuwa), lambda m: video_loss(m, cond_dropout_prob=0.7)))


@pytest.mark.parametrize("dropout", [0.0, DROP])
def test_nuwa_with_video_and_audio_trains_as_in_plain_autograd(twins: Load, dropout: float) -> None:
    package = twins("nuwa_pytorch")
    with in_double(package):
        trio = package.trio(lambda p: nuwa_video_audio(p, dropout=dropout))
        assert right(train(trio, lambda m: video_audio_loss(m, cond_dropout_prob=0.0)))
        trio.train(False)
        compare(trio, video_audio_loss)


def test_the_axial_image_transformer_trains_as_in_plain_autograd(twins: Load) -> None:
    assert right(train(twins("axial_attention").trio(axial_image), image_loss))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": DROP, "layer_dropout": 0.4},
        {"weight_tie": True},
        {"use_rezero": True},
        {"use_full_attn": True, "use_scale_norm": True},
        {"n_local_attn_heads": 2, "num_mem_kv": 128},
        {"pkm_layers": (2,)},
    ],
    ids=str,
)
def test_the_reformer_trains_as_in_plain_autograd(twins: Load, options: dict[str, Any]) -> None:
    trio = twins("reformer_pytorch").trio(lambda p: reformer_lm(p, **options))
    assert right(train(trio, language_loss)) or "pkm_layers" in options
    trio.train(False)
    compare(trio, language_loss)


def test_the_reformer_trains_on_short_sequences_with_layer_dropout(twins: Load) -> None:
    """Published: the blocks that run are the reversible ones, without their backward: no gradient at all."""
    trio = twins("reformer_pytorch").trio(lambda p: reformer_lm(p, reverse_thres=100, layer_dropout=0.4))
    outcomes = train(trio, language_loss)
    assert all(torch.isinf(o.grads["error"]) for o in outcomes)


def test_the_recorder_of_reformer_sees_each_layer_once(twins: Load) -> None:
    """It observes the attention by a callback, and makes it compute more, until the forward pass is over."""
    package = twins("reformer_pytorch")
    trio = package.trio(reformer_lm, dtype=torch.float32)  # the recorded attention is float32, whatever the model is
    plain = run(trio.plain, language_loss)
    recorder = package.ours.Recorder(trio.ours)
    recorded = run(trio.ours, lambda _: language_loss(recorder))
    assert distance(recorded.grads, plain.grads) <= 1e-5
    assert {k: len(v) for k, v in recorder.recordings.items()} == {0: 3}


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_is_bit_identical_in_float32_with_and_without_grad(twins: Load, name: str) -> None:
    model = MODELS[name]
    trio = twins(model.package).trio(lambda p: model.make(p, dropout=DROP), dtype=torch.float32)
    start = copy.deepcopy(trio.ours.state_dict())
    for training in (True, False):
        losses = []
        for each in (trio.theirs, trio.ours):
            for grad in (True, False):
                each.load_state_dict(start, strict=True)
                each.train(training)
                torch.manual_seed(1)
                with torch.set_grad_enabled(grad):
                    losses.append(model.loss(each))
        assert all(torch.equal(loss, losses[0]) for loss in losses)


def peak(model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> int:
    with MemoryTracker(ignore=[model]) as memory:
        loss(model).backward()
    return memory.peak


def test_activation_memory_of_a_published_model_does_not_grow_with_depth(twins: Load) -> None:
    package = twins("axial_attention")
    ours, stored = [], []
    for depth in (2, 8):
        trio = package.trio(lambda p: axial_image(p, depth=depth))  # noqa: B023
        for model, peaks in ((trio.ours, ours), (trio.plain, stored)):
            image_loss(model).backward()  # so that there are gradients to ignore
            peaks.append(peak(model, image_loss))
    assert stored[1] > 2.5 * stored[0]
    assert ours[1] < 1.1 * ours[0]
