"""Plans from a budget: optimal for the measured costs, and true to real runs."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.checkpoint import CheckpointTape
from retrograde.measure import default_loss, timing, training_step
from retrograde.memory import CHECKPOINT, MODES
from retrograde.planning import (
    BlockCost,
    BudgetError,
    ChainCost,
    ModeCost,
    cheapest,
    compare,
    measure,
    measured,
    pareto,
    plan,
    predict,
    smallest,
)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on how often a block's time is taken."""
    monkeypatch.setattr(timing, "_PATIENCE", 0.0)


def random_chain(depth: int, seed: int, *, like: bool = False) -> ChainCost:
    """Random costs, or those of blocks that are all alike."""
    draw = random.Random(seed)
    cast = draw.choice([0, 0, 12])  # what autocast caches

    def block() -> BlockCost:
        streams = draw.randint(1, 5)
        modes: dict[Any, ModeCost] = {
            "store": ModeCost(
                draw.random(), draw.randint(5, 30), streams // 2, streams // 2, draw.randint(1, 9), draw.randint(10, 40)
            ),
            "checkpoint": ModeCost(
                1 + draw.random(), streams, streams, 0, draw.randint(1, 10), draw.randint(10, 40), draw.randint(0, cast)
            ),
        }
        if draw.random() < 0.8:
            peaks = draw.randint(1, 10), draw.randint(10, 30)
            modes["reverse"] = ModeCost(1 + draw.random(), 0, 0, streams, *peaks, draw.randint(0, cast))
        if draw.random() < 0.3 and "reverse" in modes:
            modes["selective"] = ModeCost(0.8 + draw.random(), 2, 0, streams, draw.randint(1, 10), draw.randint(10, 30))
        return BlockCost(streams, draw.randint(0, 6), modes)

    blocks = [block()] * depth if like else [block() for _ in range(depth)]
    anchors = frozenset(i for i in range(1, depth) if draw.random() < 0.2)
    return ChainCost(tuple(blocks), 4, draw.randint(0, 5), draw.randint(0, 30), draw.randint(0, 5), 0.1, anchors)


def by_brute_force(chain: ChainCost) -> list[tuple[int, float]]:
    """The peak and time of every plan there is."""
    return [tuple(predict(chain, memory)) for memory in itertools.product(*(block.modes for block in chain.blocks))]


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_within_the_budget_is_faster_than_the_chosen_one(seed: int) -> None:
    chain = random_chain(depth=1 + seed % 7, seed=seed, like=seed % 3 == 0)
    every = by_brute_force(chain)
    for budget in {peak for peak, _ in every} | {max(peak for peak, _ in every) + 1}:
        best = min(seconds for peak, seconds in every if peak <= budget)
        memory = cheapest(chain, budget)
        assert memory is not None
        assert predict(chain, memory).peak <= budget
        assert predict(chain, memory).seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_least_budget_is_that_of_the_smallest_plan(seed: int) -> None:
    chain = random_chain(depth=1 + seed % 7, seed=seed)
    least = min(peak for peak, _ in by_brute_force(chain))
    assert smallest(chain) == least
    assert cheapest(chain, least) is not None
    assert cheapest(chain, least - 1) is None


def test_a_deep_chain_of_different_blocks_is_planned_in_reasonable_time() -> None:
    chain = random_chain(depth=64, seed=1)
    memory = cheapest(chain, 2 * smallest(chain))
    assert memory is not None
    assert predict(chain, memory).peak <= 2 * smallest(chain)


@pytest.mark.parametrize("seed", range(12))
def test_times_add_up_to_those_of_whole_steps(seed: int) -> None:
    chain = random_chain(depth=1 + seed % 7, seed=seed, like=True)
    steps: dict[Any, float] = {mode: 10.0 + i for i, mode in enumerate(chain.uniform())}
    scaled = chain.with_steps(steps)
    for mode, memory in chain.uniform().items():
        assert predict(scaled, memory).seconds == pytest.approx(steps[mode], rel=1e-12)
        assert predict(scaled, memory).peak == predict(chain, memory).peak
    half = ["store"] * (len(chain.blocks) // 2) + ["checkpoint"] * (len(chain.blocks) - len(chain.blocks) // 2)
    assert steps["store"] <= predict(scaled, half).seconds <= steps["checkpoint"]


def test_modes_without_a_timed_whole_step_keep_the_times_of_their_blocks() -> None:
    chain = random_chain(depth=4, seed=3, like=True)
    scaled = chain.with_steps({"checkpoint": 100.0})
    assert scaled.seconds_outside > 0
    blocks = zip(scaled.blocks, chain.blocks, strict=True)
    assert all(a.modes["store"].seconds == b.modes["store"].seconds for a, b in blocks)
    assert chain.with_steps({}).blocks == chain.blocks


def test_a_uniform_plan_has_an_equal_mode_or_the_fallback_where_a_block_lacks_one() -> None:
    cost = ModeCost(1.0, 0, 0, 0, 0, 0)
    modes: list[list[Any]] = [["store", "checkpoint"], ["store", "checkpoint", "reverse"]]
    modes.append(["store", "checkpoint", "reverse", "selective"])
    same: dict[Any, Any] = {"selective": "reverse"}
    blocks = [BlockCost(0, 0, dict.fromkeys(names, cost), same if names[-1] == "reverse" else {}) for names in modes]
    chain = ChainCost(tuple(blocks), 0)
    assert chain.uniform() == {
        "store": ("store", "store", "store"),
        "checkpoint": ("checkpoint", "checkpoint", "checkpoint"),
        "reverse": ("checkpoint", "reverse", "reverse"),
        "selective": ("checkpoint", "reverse", "selective"),
    }


class Branch(nn.Sequential):
    def __init__(self, width: int, factor: int) -> None:
        super().__init__(
            nn.LayerNorm(width), nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
        )


class Classifier(nn.Module):
    """An embedding, a stack whose blocks differ in size, and a head."""

    def __init__(self, depth: int = 8, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, width)
        blocks = [rg.two_stream(Branch(width, 1 + i % 3), Branch(width, 4)) for i in range(depth)]
        self.stack = rg.ReversibleSequence(blocks)
        self.head = nn.Linear(width, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stack(self.embed(tokens)))
        return logits


@pytest.fixture(scope="module")
def costs() -> tuple[Classifier, Tensor, ChainCost]:
    torch.manual_seed(0)
    model, tokens = Classifier(), torch.randint(0, 200, (4, 128))
    return model, tokens, measure(model, tokens)


PLANS = [
    ["store"] * 8,
    ["checkpoint"] * 8,
    ["reverse"] * 8,
    ["store"] * 3 + ["reverse"] * 5,
    ["reverse"] * 5 + ["store"] * 3,
    ["checkpoint"] * 2 + ["reverse"] * 3 + ["store"] * 3,
    ["reverse", "checkpoint"] * 4,
    ["store", "reverse", "checkpoint", "reverse", "reverse", "store", "checkpoint", "store"],
]


@pytest.mark.parametrize("memory", PLANS, ids=lambda memory: ",".join(m[0] for m in memory))
def test_the_predicted_peak_is_within_5_percent_of_the_measured_one(
    costs: tuple[Classifier, Tensor, ChainCost], memory: list[Any]
) -> None:
    model, tokens, chain = costs
    model.stack.memory = memory
    assert predict(chain, memory).peak == pytest.approx(measured(model, tokens).peak, rel=0.05)


def lean(width: int, batch: int) -> tuple[rg.ReversibleSequence, Tensor]:
    """A stack without anything around it, whose branches are one product each."""
    torch.manual_seed(0)
    blocks = [rg.two_stream(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(8)]
    return rg.ReversibleSequence(blocks), torch.randn(batch, width)


@pytest.mark.parametrize(
    "memory", [*PLANS, ["reverse", "store"] * 4], ids=lambda memory: ",".join(m[0] for m in memory)
)
@pytest.mark.parametrize(("width", "batch"), [(8, 4096), (256, 16)], ids=["mostly streams", "mostly gradients"])
def test_the_peak_is_predicted_where_it_is_made_of_streams_and_where_of_gradients(
    width: int, batch: int, memory: list[Any]
) -> None:
    stack, x = lean(width, batch)
    chain = measure(stack, x)
    stack.memory = memory
    assert predict(chain, memory).peak == pytest.approx(measured(stack, x).peak, rel=0.05)


def test_measured_peaks_differ_enough_to_tell_plans_apart(costs: tuple[Classifier, Tensor, ChainCost]) -> None:
    _, _, chain = costs
    peaks = [predict(chain, memory).peak for memory in PLANS]
    assert max(peaks) > 1.5 * min(peaks)


def test_plans_on_the_pareto_curve_trade_time_for_memory(costs: tuple[Classifier, Tensor, ChainCost]) -> None:
    _, _, chain = costs
    curve = pareto(chain)
    assert len(curve) > 4
    assert [p.peak for p in curve] == sorted({p.peak for p in curve})
    assert [p.seconds for p in curve] == sorted((p.seconds for p in curve), reverse=True)
    assert curve[0].peak == smallest(chain)


def test_a_plan_fits_its_budget_when_it_is_run(costs: tuple[Classifier, Tensor, ChainCost]) -> None:
    model, tokens, chain = costs
    least, most = smallest(chain), predict(chain, ["store"] * 8).peak
    budget = (least + most) // 2
    planned = plan(model, tokens, budget)
    assert "store" in planned.plan.memory
    assert set(planned.plan.memory) - {"store"}
    model.stack.memory = planned.plan
    assert measured(model, tokens).peak <= 1.05 * budget
    assert "x" in str(planned)


def test_a_budget_below_the_least_names_it(costs: tuple[Classifier, Tensor, ChainCost]) -> None:
    model, tokens, _ = costs
    with pytest.raises(BudgetError, match=r"No plan fits 1 KiB: the least .* is .* \(\d+ bytes\)") as error:
        plan(model, tokens, "1KiB")
    assert plan(model, tokens, error.value.minimum).peak <= error.value.minimum
    with pytest.raises(BudgetError):
        plan(model, tokens, error.value.minimum - 1)


def test_measuring_leaves_the_model_unchanged() -> None:
    model, tokens = Classifier(depth=2, width=16), torch.randint(0, 200, (2, 8))
    model.stack.blocks[0].steps[0].branch.append(nn.BatchNorm1d(8))
    model.stack.blocks[1].steps[0].branch.append(nn.Dropout(0.5))
    model.stack.blocks[1].steps[1].branch.register_forward_pre_hook(lambda *_: [random.random(), None][1])
    model(tokens).sum().backward()
    before = [(p.clone(), p.grad.clone()) for p in model.parameters() if p.grad is not None]
    python = random.getstate()
    buffers, state, memory = [b.clone() for b in model.buffers()], torch.get_rng_state(), model.stack.memory
    plan(model, tokens, "1GiB")
    after = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    for (value, grad), (value_now, grad_now) in zip(before, after, strict=True):
        assert torch.equal(value, value_now)
        assert torch.equal(grad, grad_now)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == python
    assert model.stack.memory == memory


def test_a_model_without_a_stack_or_with_several_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear contains no retrograde\.ReversibleSequence"):
        plan(nn.Linear(2, 2), torch.randn(2, 2), "1GiB")
    two = nn.Sequential(Classifier(1, 16).stack, Classifier(2, 16).stack)
    with pytest.raises(ValueError, match=r"2 ReversibleSequences.*'0', '1'.*stack="):
        plan(two, torch.randn(2, 16), "1GiB")
    with pytest.raises(ValueError, match="no ReversibleSequence 'encoder'; it has '0', '1'"):
        plan(two, torch.randn(2, 16), "1GiB", stack="encoder")


@pytest.mark.parametrize("by", ["name", "itself"])
def test_of_several_stacks_one_is_chosen_by_its_name_or_by_itself(by: str) -> None:
    two = nn.Sequential(Classifier(1, 16).stack, Classifier(2, 16).stack)
    batch = torch.randn(2, 16)
    stack: Any = "1" if by == "name" else two[1]
    planned = plan(two, batch, "1GiB", stack=stack)
    assert planned.plan.memory == ("store", "store")
    assert len(measure(two, batch, stack=stack).blocks) == 2
    assert compare(two, batch, planned, stack=stack).rows[-1].plan == "blocks 0-1 store"


def test_a_model_without_a_loss_is_planned_with_the_default_loss_of_all_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []

    def default(output: Any) -> Tensor:
        loss = default_loss(output)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(training_step, "default_loss", default)
    torch.manual_seed(0)
    stack, x = Classifier(1, 16).stack, torch.randn(2, 16)
    planned = plan(stack, x, "1GiB")
    compare(stack, x, planned)
    measured(stack, x)
    assert set(losses) == {default_loss(stack(x)).item()}


@dataclass
class RoundedStreams:
    """Streams in half the bytes."""

    streams: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(s.float() for s in self.streams)


def test_a_registered_mode_is_measured_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saves rounded streams: half of what a checkpoint saves."""
    keep = partial(CheckpointTape, keep=lambda streams: RoundedStreams(tuple(s.bfloat16() for s in streams)))
    monkeypatch.setitem(MODES, "rounded", rg.MemoryMode("rounded", "half a checkpoint", keep, blocks_per_tape=1))
    stack = rg.ReversibleSequence([rg.two_stream(Branch(32, 1), Branch(32, 1)) for _ in range(8)])
    x = torch.randn(512, 32)
    chain = measure(stack, x)
    inner = chain.blocks[3].modes
    assert inner["rounded"].saved == pytest.approx(inner["checkpoint"].saved / 2, rel=0.01)
    stack.memory = "rounded"
    assert predict(chain, stack.memory.memory).peak == pytest.approx(measured(stack, x).peak, rel=0.05)
    without = replace(chain, blocks=tuple(replace(b, modes={"rounded": b.modes["rounded"]}) for b in chain.blocks))
    assert cheapest(without, smallest(without)) == ("rounded",) * 8


def test_modes_that_share_a_tape_between_blocks_without_an_inverse_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their costs do not add up block by block."""
    mode = replace(CHECKPOINT, name="pairs", blocks_per_tape=2)
    monkeypatch.setitem(MODES, "pairs", mode)
    assert "pairs" not in measure(*lean(8, 16)).uniform()


def test_blocks_without_an_inverse_are_planned_too() -> None:
    stack = rg.ReversibleSequence(
        [rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8)), rg.transition(nn.Linear(8, 4), nn.Linear(8, 4))],
        memory=["reverse", "checkpoint"],
    )
    planned = plan(stack, torch.randn(16, 8), "1MiB")
    stack.memory = planned.plan
    stack(torch.randn(16, 8)).sum().backward()
