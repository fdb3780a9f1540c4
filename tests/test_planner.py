"""Plans from a budget: optimal for the measured costs, and true to real runs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.planning import (
    BlockCost,
    BudgetError,
    ChainCost,
    ModeCost,
    _measure,
    cheapest,
    measure,
    measured,
    pareto,
    parse_size,
    plan,
    predict,
    show_size,
    smallest,
)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on how often a block's time is taken."""
    monkeypatch.setattr(_measure, "_PATIENCE", 0.0)


def random_chain(depth: int, seed: int, *, like: bool = False) -> ChainCost:
    """Costs without rhyme or reason, or those of blocks that are all alike."""
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
            modes["partial"] = ModeCost(0.8 + draw.random(), 2, 0, streams, draw.randint(1, 10), draw.randint(10, 30))
        return BlockCost(streams, draw.randint(0, 6), modes)

    blocks = [block()] * depth if like else [block() for _ in range(depth)]
    anchors = frozenset(i for i in range(1, depth) if draw.random() < 0.2)
    return ChainCost(tuple(blocks), 4, draw.randint(0, 5), draw.randint(0, 30), draw.randint(0, 5), 0.1, anchors)


def by_brute_force(chain: ChainCost) -> list[tuple[int, float]]:
    """The peak and time of every plan there is."""
    return [tuple(predict(chain, memory)) for memory in itertools.product(*(block.modes for block in chain.blocks))]


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_faster_within_the_budget_than_the_one_found(seed: int) -> None:
    chain = random_chain(depth=1 + seed % 7, seed=seed, like=seed % 3 == 0)
    every = by_brute_force(chain)
    for budget in {peak for peak, _ in every} | {max(peak for peak, _ in every) + 1}:
        best = min(seconds for peak, seconds in every if peak <= budget)
        found = cheapest(chain, budget)
        assert found is not None
        assert predict(chain, found).peak <= budget
        assert predict(chain, found).seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_least_budget_is_that_of_the_smallest_plan(seed: int) -> None:
    chain = random_chain(depth=1 + seed % 7, seed=seed)
    least = min(peak for peak, _ in by_brute_force(chain))
    assert smallest(chain) == least
    assert cheapest(chain, least) is not None
    assert cheapest(chain, least - 1) is None


def test_a_deep_chain_of_unlike_blocks_is_planned_in_reasonable_time() -> None:
    chain = random_chain(depth=64, seed=1)
    found = cheapest(chain, 2 * smallest(chain))
    assert found is not None
    assert predict(chain, found).peak <= 2 * smallest(chain)


@pytest.mark.parametrize("seed", range(12))
def test_times_add_up_to_those_of_whole_steps(seed: int) -> None:
    chain = random_chain(depth=1 + seed % 7, seed=seed, like=True)
    steps: dict[Any, float] = {mode: 10.0 + i for i, mode in enumerate(chain.uniform())}
    found = chain.with_steps(steps)
    for mode, memory in chain.uniform().items():
        assert predict(found, memory).seconds == pytest.approx(steps[mode], rel=1e-12)
        assert predict(found, memory).peak == predict(chain, memory).peak
    half = ["store"] * (len(chain.blocks) // 2) + ["checkpoint"] * (len(chain.blocks) - len(chain.blocks) // 2)
    assert steps["store"] <= predict(found, half).seconds <= steps["checkpoint"]


def test_what_no_whole_step_was_timed_for_keeps_the_times_of_its_blocks() -> None:
    chain = random_chain(depth=4, seed=3, like=True)
    found = chain.with_steps({"checkpoint": 100.0})
    assert found.seconds_outside > 0
    blocks = zip(found.blocks, chain.blocks, strict=True)
    assert all(a.modes["store"].seconds == b.modes["store"].seconds for a, b in blocks)
    assert chain.with_steps({}).blocks == chain.blocks


def test_a_uniform_plan_has_the_nearest_mode_where_a_block_lacks_one() -> None:
    cost = ModeCost(1.0, 0, 0, 0, 0, 0)
    modes: list[list[Any]] = [["store", "checkpoint"], ["store", "checkpoint", "reverse"]]
    modes.append(["store", "checkpoint", "reverse", "partial"])
    chain = ChainCost(tuple(BlockCost(0, 0, dict.fromkeys(names, cost)) for names in modes), 0)
    assert chain.uniform() == {
        "store": ("store", "store", "store"),
        "checkpoint": ("checkpoint", "checkpoint", "checkpoint"),
        "reverse": ("checkpoint", "reverse", "reverse"),
        "partial": ("checkpoint", "reverse", "partial"),
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
        found: Tensor = self.head(self.stack(self.embed(tokens)))
        return found


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


def test_measuring_leaves_the_model_as_it_was() -> None:
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


def test_what_has_no_stack_or_several_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ReversibleSequences"):
        plan(nn.Linear(2, 2), torch.randn(2, 2), "1GiB")
    two = nn.Sequential(Classifier(1, 16).stack, Classifier(1, 16).stack)
    with pytest.raises(ValueError, match=r"2 ReversibleSequences.*stack="):
        plan(two, torch.randn(2, 16), "1GiB")
    stack = two[0]
    assert isinstance(stack, rg.ReversibleSequence)
    assert plan(two, torch.randn(2, 16), "1GiB", stack=stack).plan.memory == ("store",)


def test_blocks_without_an_inverse_are_planned_too() -> None:
    stack = rg.ReversibleSequence(
        [rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8)), rg.transition(nn.Linear(8, 4), nn.Linear(8, 4))],
        memory=["reverse", "checkpoint"],
    )
    planned = plan(stack, torch.randn(16, 8), "1MiB")
    stack.memory = planned.plan
    stack(torch.randn(16, 8)).sum().backward()


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 2**33), ("500MB", 500_000_000), ("1.5k", 1500), ("64 mib", 2**26), ("2Ti", 2**41), ("77", 77), (7, 7)],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 parsecs", "-3MB", "0", "1..5GB", "8iB", "1e3", "8 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a size|above 0"):
        parse_size(text)


def test_sizes_are_written_for_people() -> None:
    assert [show_size(n) for n in (12, 2048, 3 * 2**20, 5 * 2**30, 1000 * 2**40)] == [
        "12 B",
        "2 KiB",
        "3 MiB",
        "5 GiB",
        "1000 TiB",
    ]
