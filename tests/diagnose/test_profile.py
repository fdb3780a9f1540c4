"""The memory profile: where a training step's memory goes, over time and by block, and what its peak is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retrograde as rg
from retrograde.diagnose import ExaminationError, ModeProfile, Profile, profile
from retrograde.diagnose._profile import AFTER, BEFORE, OWN, SAVED
from retrograde.engine.torch_internals import TELLS_RESULTS
from retrograde.measure import MemoryTracker, format_bytes
from retrograde.models import ReversibleLM


def branch(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))


def stack(depth: int) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(branch(), branch()) for _ in range(depth)])


def by_mode(memory: Profile) -> dict[str, ModeProfile]:
    return {mode.memory: mode for mode in memory.modes}


@pytest.fixture(scope="module")
def deep() -> Profile:
    torch.manual_seed(0)
    return profile(stack(12), torch.randn(64, 16))


def test_stored_blocks_go_up_forward_and_down_backward(deep: Profile) -> None:
    store = by_mode(deep)["store"]
    totals = [sum(kinds) for kinds in store.timeline]
    assert totals[store.top] == max(totals) == store.peak
    fourths = [totals[store.turn * i // 4] for i in range(4)]
    assert fourths == sorted(fourths)
    rest = len(totals) - store.turn
    falling = [totals[store.turn + rest * i // 4] for i in range(4)]
    assert falling == sorted(falling, reverse=True)
    saved = {block.saved for block in store.blocks[:-1]}
    assert len(saved) == 1, "equal blocks save the same"
    assert store.blocks[-1].peak > 2 * store.blocks[0].peak


def test_reversed_blocks_save_nothing_but_the_last_step_and_are_flat(deep: Profile) -> None:
    reverse = by_mode(deep)["reverse"]
    assert all(block.saved == 0 for block in reverse.blocks[:-2]), "the last step reads what the block before it made"
    assert len({block.peak for block in reverse.blocks[1:-2]}) == 1
    assert by_mode(deep)["store"].peak > by_mode(deep)["checkpoint"].peak > reverse.peak


def test_the_parts_add_up_to_the_peak_and_the_kinds_to_the_timeline(deep: Profile) -> None:
    for mode in deep.modes:
        assert sum(part.bytes for part in mode.parts) == mode.peak
        assert mode.timeline[mode.top] == tuple(mode.bytes_of(kind) for kind in (BEFORE, SAVED, AFTER, OWN))
        assert all(min(kinds) >= 0 for kinds in mode.timeline)


def test_the_peak_is_the_trackers(deep: Profile) -> None:
    """Of the same step, measured without any of this."""
    torch.manual_seed(0)
    model, x = stack(12), torch.randn(64, 16)
    for mode in ("store", "reverse"):
        model.memory = mode
        for _ in range(2):  # so that the gradients are there to be ignored
            with MemoryTracker(ignore=[model, x]) as tracker:
                (model(x) ** 2).mean().backward()
        assert by_mode(deep)[mode].peak == pytest.approx(tracker.peak, rel=0.1)


def test_the_sentence_names_stored_activations_and_what_reversing_measured(deep: Profile) -> None:
    assert deep.sentences["store"].startswith(
        "The peak is the activations that are stored for the backward pass in 12 blo"
    )
    reverse = by_mode(deep)["reverse"]
    assert f'memory="reverse" peaks at {format_bytes(reverse.peak)}, measured.' in deep.advice["store"]
    assert deep.sentences["reverse"].startswith("The peak is one block's own step and its streams, ")
    assert "does not grow with depth" in deep.advice["reverse"]


def test_the_sentence_names_the_logits_where_they_are_the_peak() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(3000, (2, 32))
    model = ReversibleLM(3000, 16, 4, 2)
    memory = profile(
        model, tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), tokens.flatten()), modes=["reverse"]
    )
    assert memory.sentences["reverse"].startswith("The peak is the output (2 × 32 × 3000, 750 KiB) and what the loss")
    assert memory.sentences["reverse"].endswith("not the blocks.")
    assert "chunked_cross_entropy" in memory.advice["reverse"]


def test_the_advice_helps() -> None:
    """The loss a part at a time, as advised, has the blocks as its peak, and a lower one."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ReversibleLM(3000, 16, 4, 2, loss_chunk=4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model.loss(tokens)

    tokens = torch.randint(3000, (2, 33))
    chunked = profile(Chunked(), tokens, loss=lambda y: y, modes=["reverse"]).modes[0]
    whole = profile(
        ReversibleLM(3000, 16, 4, 2), tokens[:, :-1], modes=["reverse"],
        loss=lambda y: F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten()),
    ).modes[0]  # fmt: skip
    assert chunked.peak < whole.peak / 2


def test_what_comes_before_the_blocks_is_named_too() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Sequential(nn.Linear(16, 4000), nn.GELU(), nn.Linear(4000, 16))
            self.stack = stack(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack(self.enter(x))  # type: ignore[no-any-return]

    memory = profile(Wide(), torch.randn(64, 16), modes=["reverse"])
    assert memory.sentences["reverse"].startswith("The peak is what comes before the blocks")


def test_the_model_is_left_unchanged() -> None:
    model, x = stack(3), torch.randn(4, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = model.memory
    profile(model, x)
    assert model.memory is plan
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def with_a_transition() -> rg.ReversibleSequence:
    torch.manual_seed(0)
    blocks = [rg.two_stream(branch(), branch(), save_ops="products") for _ in range(6)]
    return rg.ReversibleSequence([*blocks[:2], rg.transition(branch(), branch()), *blocks[2:]])


@pytest.mark.skipif(not TELLS_RESULTS, reason='with this torch, "selective" saves nothing')
def test_every_mode_can_be_profiled_on_a_model_with_a_stage_transition() -> None:
    x = torch.randn(64, 16)
    modes = by_mode(profile(with_a_transition(), x, modes=("store", "selective", "reverse")))
    assert modes["store"].peak > modes["selective"].peak > modes["reverse"].peak
    assert modes["selective"].needs_inverse
    reversed_, selective = ([block.saved for block in modes[name].blocks] for name in ("reverse", "selective"))
    assert reversed_[:4] == [0, 2 * x.nbytes, 0, 0], "the transition is checkpointed: its input is saved"
    assert min(selective[0], selective[3]) > 0, "results of products are saved"


def test_a_model_without_parameters_is_profiled_backward_too() -> None:
    blocks = [rg.two_stream(torch.tanh, torch.tanh) for _ in range(4)]
    store = profile(rg.ReversibleSequence(blocks), torch.randn(64, 16).requires_grad_(), modes=["store"]).modes[0]
    assert all(block.peak > 0 for block in store.blocks)


def test_a_batch_may_be_a_tuple_or_a_mapping() -> None:
    model, x = stack(3), torch.randn(4, 16)
    peaks = [profile(model, batch, modes=["reverse"]).modes[0].peak for batch in (x, (x,), [x])]
    assert len(set(peaks)) == 1

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = model

        def forward(self, *, tokens: torch.Tensor) -> torch.Tensor:
            return self.stack(tokens)  # type: ignore[no-any-return]

    assert profile(Named(), {"tokens": x}, modes=["reverse"]).modes[0].peak == peaks[0]


def test_a_checkpoint_is_said_to_grow_with_depth_and_it_does() -> None:
    """Few saved streams beside a wide branch: the peak is a block's own step, and grows all the same."""
    x, profiles = torch.randn(64, 16), {}
    for depth in (2, 8, 32):
        blocks = [rg.two_stream(branch(512), branch(512)) for _ in range(depth)]
        profiles[depth] = profile(rg.ReversibleSequence(blocks), x, modes=["checkpoint", "reverse"])
    for depth, memory in profiles.items():
        assert memory.sentences["checkpoint"].startswith("The peak is one block's own step"), depth
        assert memory.advice["checkpoint"].startswith("It grows with depth")
        assert "does not grow with depth" in memory.advice["reverse"]
    assert f"It grows with depth, by {format_bytes(2 * x.nbytes)} per block." in profiles[8].advice["checkpoint"]
    grown = by_mode(profiles[32])["checkpoint"].peak - by_mode(profiles[8])["checkpoint"].peak
    assert grown == pytest.approx(24 * 2 * x.nbytes, rel=0.1)
    assert by_mode(profiles[32])["reverse"].peak == by_mode(profiles[8])["reverse"].peak


@pytest.mark.parametrize("where", [0, 3])
def test_nan_that_a_block_makes_is_blamed_on_that_block(where: int) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float("nan")

    blocks = [rg.two_stream(Broken() if i == where else branch(), branch()) for i in range(5)]
    with pytest.raises(ExaminationError, match=f"block {where}, branch Broken, returns NaN or infinity, from finite"):
        profile(rg.ReversibleSequence(blocks), torch.randn(4, 16))


def test_nan_in_the_batch_is_blamed_on_no_block() -> None:
    with pytest.raises(ExaminationError, match="no branch of a reversible stack makes NaN"):
        profile(stack(3), torch.full((4, 16), float("nan")))


def test_a_model_without_values_is_refused_in_a_sentence() -> None:
    with pytest.raises(ExaminationError, match="on the meta device"):
        profile(stack(3).to("meta"), torch.randn(4, 16, device="meta"))
