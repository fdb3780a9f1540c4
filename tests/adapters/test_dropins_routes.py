"""Routing and nuwa: routes of arguments, auxiliary losses, layer drop, untracked state, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde.adapters import (
    nuwa_pytorch,
    routing_transformer,
)
from systems import WIDTH, Mix, Spy, WithLoss, doubled, halves, pairs, spies, streams


def test_routing_hands_an_argument_to_the_branches_that_its_route_names() -> None:
    blocks = spies(2)
    routes = {"mask": ((True, False), (False, False)), "pos": ((True, True), (False, True))}
    routing_transformer.ReversibleSequence(blocks, args_route=routes)(streams(2, 3), mask=1, pos=2)
    given = [[set(branch.calls[0]) - {"_reverse"} for branch in pair] for pair in blocks]
    assert given == [[{"mask", "pos"}, {"pos"}], [set(), {"pos"}]]


def test_routing_tells_branches_whether_they_are_replayed() -> None:
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
    for gradients in grads:
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_routing_draws_layer_drop_as_published(seed: int) -> None:
    torch.manual_seed(seed)
    blocks = pairs(5)
    module = routing_transformer.ReversibleSequence(blocks, layer_dropout=0.6)
    x = torch.randn(2, 3, WIDTH)
    torch.manual_seed(seed)
    dropped = torch.empty(5).uniform_(0, 1) < 0.6
    running = [pair for pair, drop in zip(blocks, dropped, strict=True) if not drop] or [blocks[0]]
    expected = halves(doubled(running, torch.cat([x, x], dim=-1), 2), -1).mean(dim=0)
    torch.manual_seed(seed)
    assert torch.equal(module(x)[0], expected)
    module.layer_dropout = 0.0
    assert module.layer_drop == [0.0] * 5


def test_routing_ignores_the_unused_argument_of_the_encoder_decoder_and_no_other() -> None:
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
        mask = torch.rand(WIDTH, dtype=torch.float64) > 0.3
        return torch.tanh(self.linear(x * self.means.clone())) * mask


def test_routing_replays_buffers_that_were_written_through_data() -> None:
    grads = []
    for memory in ("store", "reverse"):
        torch.manual_seed(0)
        blocks = pairs(3, make=Means)
        module = routing_transformer.ReversibleSequence(blocks)
        module.memory = memory  # type: ignore[assignment]
        out, _ = module(streams(2, 3))
        for branch in module.modules():  # as by a hook that moves the means before the blocks' backward
            if isinstance(branch, Means):
                branch.means.data.mul_(0.5)
        out.square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
        assert all(branch.runs == 1 for pair in blocks for branch in pair), "a replay does not count"
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=0)


def test_nuwa_sums_its_streams_and_refuses_arguments_without_a_route() -> None:
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


def test_nuwa_is_right_although_the_mask_is_edited_after_the_call() -> None:
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
