"""What is particular to each drop-in: arguments and their routes, auxiliary losses, signals, shapes, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from systems import KINDS, WIDTH, Mix, Spatial, doubled, halves, pairs
from torch import Tensor, nn

from retrograde.adapters import (
    axial_attention,
    lie_transformer_pytorch,
    nuwa_pytorch,
    nuwa_pytorch_video_audio,
    reformer_pytorch,
    routing_transformer,
)


class Spy(nn.Module):
    """A linear branch that notes the arguments of each of its runs."""

    def __init__(self, width: int = WIDTH, *, dim: int = -1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).double()
        self.dim = dim
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor, *others: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append(kwargs)
        y: Tensor = self.linear(x.movedim(self.dim, -1)).movedim(-1, self.dim).tanh()
        return y + sum(other.mean() for other in others)


class WithLoss(Spy):
    def forward(self, x: Tensor, *others: Tensor, **kwargs: Any) -> Any:
        y = super().forward(x, *others, **kwargs)
        return y, y.square().mean()


def streams(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def spies(depth: int, count: int = 2, make: Callable[[], nn.Module] = Spy) -> Any:
    return pairs(depth, count, make)


# routing


def test_routing_hands_an_argument_to_the_branches_that_its_route_names() -> None:
    blocks = spies(2)
    routes = {"mask": ((True, False), (False, False)), "pos": ((True, True), (False, True))}
    routing_transformer.ReversibleSequence(blocks, args_route=routes)(streams(2, 3), mask=1, pos=2)
    given = [[set(branch.calls[0]) - {"_reverse"} for branch in pair] for pair in blocks]
    assert given == [[{"mask", "pos"}, {"pos"}], [set(), {"pos"}]]


def test_routing_tells_branches_whether_they_run_again() -> None:
    blocks = spies(2)
    out, _ = routing_transformer.ReversibleSequence(blocks)(streams(2, 3))
    out.sum().backward()
    signals = [[call["_reverse"] for call in branch.calls] for pair in blocks for branch in pair]
    assert signals == [[False, True], [False, True], [False, True], [False]], "the last step keeps its graph"


def test_routing_sums_the_auxiliary_losses_and_differentiates_them() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.ModuleList([WithLoss(), Spy()]), nn.ModuleList([Spy(), WithLoss()])])
    x = streams(2, 3).requires_grad_()
    module = routing_transformer.ReversibleSequence(blocks)
    parameters = [x, *module.parameters()]
    grads = []
    for memory in ("store", "reverse"):
        module.memory = memory  # type: ignore[assignment]
        out, aux = module(x)
        grads.append(torch.autograd.grad(out.sum() + 3 * aux, parameters))
    x1 = x2 = x
    losses = []
    for f, g in blocks:
        update, loss = routing_transformer.with_loss(f(x2))
        x1, losses = x1 + update, [*losses, loss]
        update, loss = routing_transformer.with_loss(g(x1))
        x2, losses = x2 + update, [*losses, loss]
    assert aux.shape == ()
    assert torch.equal(aux, losses[0] + losses[3])
    expected = torch.autograd.grad(((x1 + x2) / 2).sum() + 3 * sum(losses), parameters)
    for found in grads:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_routing_draws_layer_drop_as_published(seed: int) -> None:
    torch.manual_seed(seed)
    blocks = pairs(5)
    module = routing_transformer.ReversibleSequence(blocks, layer_dropout=0.6)
    x = torch.randn(2, 3, WIDTH)
    torch.manual_seed(seed)
    dropped = torch.empty(5).uniform_(0, 1) < 0.6
    kept = [pair for pair, drop in zip(blocks, dropped, strict=True) if not drop] or [blocks[0]]
    expected = halves(doubled(kept, torch.cat([x, x], dim=-1), 2), -1).mean(dim=0)
    torch.manual_seed(seed)
    assert torch.equal(module(x)[0], expected)
    module.layer_dropout = 0.0
    assert module.layer_drop == [0.0] * 5


def test_routing_drops_the_argument_that_the_encoder_decoder_passes_for_nothing_and_no_other() -> None:
    for kind in (routing_transformer.ReversibleSequence, routing_transformer.SequentialSequence):
        module = kind(pairs(1), args_route={"mask": ((True, False),)})
        module(torch.randn(2, 3, WIDTH), aux_loss=torch.tensor(1.0))
        with pytest.raises(TypeError, match=r"No block receives the arguments \['masc'\].*routes for \['mask'\]"):
            module(torch.randn(2, 3, WIDTH), masc=1)


@pytest.mark.parametrize("kind", [routing_transformer.ReversibleSequence, routing_transformer.SequentialSequence,
                                  nuwa_pytorch.ReversibleSequence])  # fmt: skip
def test_a_route_of_the_wrong_length_or_form_is_an_error(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"args_route\['mask'\] has 1 entries for 2 blocks"):
        kind(pairs(2), args_route={"mask": ((True, False),)})
    with pytest.raises(ValueError, match=r"args_route\['mask'\], block 1: \(True,\) is not a pair"):
        kind(pairs(2), args_route={"mask": ((True, False), (True,))})


def test_routing_without_reversing_is_the_published_residual_loop() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.ModuleList([WithLoss(), Spy()]) for _ in range(2)])
    module = routing_transformer.SequentialSequence(blocks, args_route={"mask": ((True, False),) * 2})
    x = streams(2, 3)
    out, aux = module(x, mask=1)
    assert next(iter(module.state_dict())) == "layers.0.0.linear.weight"
    assert aux.shape == (1,)
    assert blocks[0][0].calls == [{"mask": 1}]
    assert blocks[0][1].calls == [{}]
    losses = torch.zeros(1, dtype=torch.float64)
    for f, g in blocks:
        update, loss = f(x)
        x, losses = x + update, losses + loss
        x = x + g(x)
    assert torch.equal(out, x)
    assert torch.equal(aux, losses)


class Means(nn.Module):
    """Like routing's k-means: its means are set in its first run, by a draw, and all writes go through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("means", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("started", torch.tensor(False))
        self.runs = 0

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if not self.started:
            self.means.data.copy_(torch.randn(WIDTH, dtype=torch.float64))
            self.started.data.fill_(True)
        self.runs += 1
        kept = torch.rand(WIDTH, dtype=torch.float64) > 0.3
        return torch.tanh(self.linear(x * self.means.clone())) * kept


def test_routing_replays_buffers_that_were_written_unseen() -> None:
    grads = []
    for memory in ("store", "reverse"):
        torch.manual_seed(0)
        blocks = pairs(3, make=Means)
        module = routing_transformer.ReversibleSequence(blocks)
        module.memory = memory  # type: ignore[assignment]
        out, _ = module(streams(2, 3))
        for branch in module.modules():  # a hook that moves the means before the blocks' backward
            if isinstance(branch, Means):
                branch.means.data.mul_(0.5)
        out.square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
        assert all(branch.runs == 1 for pair in blocks for branch in pair), "a replay leaves no trace"
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=0)


# nuwa


def test_nuwa_merges_by_a_sum_and_refuses_what_has_no_route() -> None:
    module = nuwa_pytorch.ReversibleSequence(pairs(1, make=lambda: Mix(dropout=0.0)))
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    x = torch.randn(2, 3, WIDTH)
    assert torch.equal(module(x), 2 * x)
    with pytest.raises(TypeError, match=r"No block receives the arguments \['mask'\].*none"):
        module(x, mask=None)


class Masked(Spy):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask[..., None]


def test_nuwa_is_right_though_the_mask_is_edited_after_the_call() -> None:
    grads = []
    for edits in (False, True):
        torch.manual_seed(0)
        module = nuwa_pytorch.ReversibleSequence(pairs(2, make=Masked), args_route={"mask": ((True, True),) * 2})
        mask = torch.tensor([[True, False, True], [True, True, True]])
        out = module(streams(2, 3), mask=mask)
        if edits:
            mask *= False
        out.square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", [nuwa_pytorch.ReversibleSequence, routing_transformer.ReversibleSequence])
def test_an_input_of_rank_four_is_handled_along_its_last_dimension(kind: Any) -> None:
    blocks = pairs(2)
    module = kind(blocks).eval()
    x = torch.randn(2, 3, 5, WIDTH)
    whole = module(x)
    parts = module(x.flatten(0, 1))
    if isinstance(whole, tuple):
        whole, parts = whole[0], parts[0]
    torch.testing.assert_close(whole.flatten(0, 1), parts)


# axial


@pytest.mark.parametrize("route", [(True, True), (True, False), (False, True), (False, False)])
def test_axial_routes_the_arguments_of_a_call_together(route: tuple[bool, bool]) -> None:
    blocks = spies(2, make=lambda: Spy(dim=1))
    module = axial_attention.ReversibleSequence(blocks)
    module(torch.randn(2, WIDTH, 3, dtype=torch.float64), arg_route=route, kv=1)
    assert [bool(branch.calls[0]) for branch in blocks[1]] == list(route)


@pytest.mark.parametrize("shape", [(2, WIDTH), (2, WIDTH, 3), (2, WIDTH, 3, 4), (2, WIDTH, 3, 4, 2)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_axial_doubles_the_channels_of_any_rank(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("channels last is a layout of images")
    blocks = pairs(2, make=lambda: Mix(dim=1, dropout=0.0))
    x = torch.randn(*shape).to(memory_format=layout)
    found = axial_attention.ReversibleSequence(blocks)(x)
    expected = doubled(blocks, torch.cat((x, x), dim=1), 1)
    assert torch.equal(found, halves(expected, 1).mean(dim=0))
    block = axial_attention.IrreversibleBlock(*blocks[0])
    assert torch.equal(block(torch.cat((x, x), dim=1), {}, {}), doubled(blocks[:1], torch.cat((x, x), dim=1), 1))
    assert next(iter(block.state_dict())) == "f.linear.weight"


def test_axial_says_that_channels_are_missing() -> None:
    with pytest.raises(ValueError, match=r"shape \(7,\) has no channels"):
        axial_attention.ReversibleSequence(pairs(1))(torch.randn(WIDTH))


# lie


@pytest.mark.parametrize("edges", [None, torch.randn(2, 3, 3, 2)])
def test_lie_returns_all_but_the_values_as_given(edges: Tensor | None) -> None:
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


# video and audio


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


# reformer


def test_reformer_sends_signals_that_say_depth_and_replay() -> None:
    blocks = spies(3)
    module = reformer_pytorch.ReversibleSequence(blocks, send_signal=True)
    module(streams(2, 3).repeat(1, 1, 2), pos=1).sum().backward()
    assert blocks[1][0].calls == [{"pos": 1, "_reverse": r, "_depth": 1} for r in (False, True)]
    assert blocks[1][1].calls == [{"_reverse": r, "_depth": 1} for r in (False, True)]
    module.eval()
    blocks[0][0].calls.clear()
    module(streams(2, 3).repeat(1, 1, 2)).sum().backward()
    assert [call["_reverse"] for call in blocks[0][0].calls] == [False, False]


def test_reformer_stores_activations_of_short_sequences_and_sends_them_no_signals() -> None:
    for length, runs in ((4, 1), (5, 2)):
        blocks = spies(2)
        module = reformer_pytorch.ReversibleSequence(blocks, reverse_thres=4, send_signal=True)
        module(torch.randn(2, length, 2 * WIDTH, dtype=torch.float64)).sum().backward()
        assert len(blocks[0][0].calls) == runs
        assert ("_reverse" in blocks[0][0].calls[0]) == (runs == 2)


def test_reformer_has_the_keys_of_its_irreversible_twins() -> None:
    blocks = pairs(2)
    module = reformer_pytorch.ReversibleSequence(blocks)
    keys = list(module.state_dict())
    expected = [f"irrev_blocks.{i}.{f}.linear.{n}" for i in (0, 1) for f in "fg" for n in ("weight", "bias")]
    assert keys[len(keys) // 2 :] == expected
    x = torch.randn(2, 3, 2 * WIDTH)
    torch.manual_seed(0)
    found = module.irrev_blocks[0](x, {}, {})
    torch.manual_seed(0)
    assert torch.equal(found, doubled(blocks[:1], x, 2))


class Cached(Spy):
    """Like reformer's attention: what it drew in its first run it keeps in an attribute, and reads in the replay."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *, _reverse: bool, _depth: int) -> Tensor:  # type: ignore[override]
        if not _reverse:
            self.cache = {**self.cache, "scale": torch.rand(WIDTH, dtype=torch.float64)}
        return super().forward(x) * self.cache["scale"]


def test_reformer_shows_each_call_its_own_cache() -> None:
    torch.manual_seed(0)
    module = reformer_pytorch.ReversibleSequence(pairs(3, make=Cached), send_signal=True)
    grads = []
    for memory in ("store", "reverse"):
        module.zero_grad()
        module.memory = memory  # type: ignore[assignment]
        torch.manual_seed(1)
        x = streams(2, 3).repeat(1, 1, 2)
        (module(x) + 2 * module(x)).square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=0)


def test_a_deterministic_replays_its_randomness_for_code_that_asks() -> None:
    holder = nuwa_pytorch.Deterministic(nn.Dropout(0.5))
    x = torch.ones(100)
    with pytest.raises(RuntimeError, match="needs an earlier call with record_rng=True"):
        holder(x, set_rng=True)
    first = holder(x, record_rng=True)
    state = torch.get_rng_state()
    assert torch.equal(holder(x, set_rng=True), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(holder(x), first)
