"""Reformer: signals, sequences too short to reverse, and the cache of its attention. And `Deterministic`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retrograde.adapters import (
    nuwa_pytorch,
    reformer_pytorch,
)
from systems import WIDTH, Spy, doubled, pairs, spies, streams


def test_reformer_passes_depth_and_replay_as_signals() -> None:
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


def test_reformer_has_the_keys_of_its_irreversible_blocks() -> None:
    blocks = pairs(2)
    module = reformer_pytorch.ReversibleSequence(blocks)
    keys = list(module.state_dict())
    expected = [f"irrev_blocks.{i}.{f}.linear.{n}" for i in (0, 1) for f in "fg" for n in ("weight", "bias")]
    assert keys[len(keys) // 2 :] == expected
    x = torch.randn(2, 3, 2 * WIDTH)
    torch.manual_seed(0)
    output = module.irrev_blocks[0](x, {}, {})
    torch.manual_seed(0)
    assert torch.equal(output, doubled(blocks[:1], x, 2))


class Cached(Spy):
    """Like reformer's attention: it saves what its first run drew in an attribute, and reads it in the replay."""

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


def test_a_deterministic_restores_its_rng_state_on_request() -> None:
    holder = nuwa_pytorch.Deterministic(nn.Dropout(0.5))
    x = torch.ones(100)
    with pytest.raises(RuntimeError, match="needs an earlier call with record_rng=True"):
        holder(x, set_rng=True)
    first = holder(x, record_rng=True)
    state = torch.get_rng_state()
    assert torch.equal(holder(x, set_rng=True), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(holder(x), first)
