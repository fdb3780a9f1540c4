"""What the planner says is true: converted models, equal blocks, equal plans, budgets that hold when they are run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.measure import timing
from retrograde.measure.stacks import parameters_of
from retrograde.memory import MODES, STORE
from retrograde.planning import (
    BlockCost,
    BudgetError,
    ChainCost,
    Comparison,
    ModeCost,
    cheapest,
    compare,
    measure,
    measured,
    plan,
    predict,
    smallest,
)
from retrograde.planning import _measure as measure_module
from retrograde.planning._blocks import least_of_rounds, measure_blocks
from retrograde.planning._compare import Row
from retrograde.planning._planner import _verified


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_PATIENCE", 0.0)


class Layer(nn.Module):
    """A residual layer that knows its own index, as those of Transformers do."""

    def __init__(self, index: int, width: int = 32) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Made = tuple[nn.Module, rg.ReversibleSequence, Tensor]


def converted(recipe: str = "momentum", depth: int = 8, rows: int = 16) -> Made:
    torch.manual_seed(0)
    model = Model(depth)
    stack = rg.convert(model, recipe).stack
    return model, stack, torch.randn(rows, 32)  # few rows: gradients are most of the peak


@pytest.fixture(scope="module")
def deep() -> ChainCost:
    """Twelve converted layers whose activations are most of the peak."""
    return measure(*converted(depth=12, rows=512)[::2])


@pytest.mark.parametrize("recipe", ["momentum", "bdia", "two_stream"])
def test_the_gradients_of_converted_layers_are_predicted(recipe: str) -> None:
    model, stack, x = converted(recipe)
    chain = measure(model, x)
    for memory in ("store", "checkpoint", "reverse"):
        stack.memory = memory
        peak = measured(model, x).peak
        assert peak > sum(p.nbytes for p in model.parameters()), "the gradients are there"
        assert predict(chain, stack.memory.memory).peak == pytest.approx(peak, rel=0.03)


def test_a_plan_for_a_converted_model_keeps_its_budget_when_it_is_run() -> None:
    model, stack, x = converted(rows=128)
    chain = measure(model, x)
    budget = (smallest(chain) + predict(chain, ["store"] * 8).peak) // 2
    planned = plan(model, x, budget)
    assert planned.measured_peak is not None
    assert planned.measured_peak <= budget
    stack.memory = planned.plan
    assert measured(model, x).peak <= budget


def test_parameters_that_a_function_closes_over_count_and_keep_their_gradients() -> None:
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(6)]

    def branch(i: int) -> Any:
        return lambda x: torch.tanh(x @ weights[i])

    stack = rg.ReversibleSequence([rg.two_stream(branch(i), nn.Tanh()) for i in range(6)])
    assert set(parameters_of(stack)) == set(weights)
    weights[0].grad = torch.ones(64, 64)
    x = torch.randn(8, 64)
    chain = measure(stack, x)
    assert [block.gradients for block in chain.blocks] == [weights[0].nbytes] * 6, (
        "each block its own, not all in a list"
    )
    for memory in ("store", "reverse"):
        stack.memory = memory
        assert predict(chain, stack.memory.memory).peak == pytest.approx(measured(stack, x).peak, rel=0.03)
    assert all(weight.grad is None for weight in weights[1:])
    assert weights[0].grad is not None
    assert torch.equal(weights[0].grad, torch.ones(64, 64))


def test_equal_blocks_have_equal_costs_though_each_knows_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []

    def count(alone: Any, modes: Any) -> Any:
        timed.append(alone)
        return least_of_rounds(alone, modes)

    monkeypatch.setattr(measure_module, "measure_blocks", partial(measure_blocks, clock=count))
    model, _, x = converted(depth=6)
    chain = measure(model, x)
    inner = chain.blocks[1:-1]  # the first reads the batch, and the last one has the recipe's last addition
    assert len({tuple(sorted((str(m), c.seconds, c.work) for m, c in block.modes.items())) for block in inner}) == 1
    assert len(timed) <= 4, "three kinds, and the last block with its graph kept"


def test_a_block_that_differs_in_a_number_that_matters_is_another_kind() -> None:
    class Repeats(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = self.linear(x)
            return x

    stack = rg.ReversibleSequence([rg.two_stream(Repeats(1 + 4 * (i % 2)), nn.Tanh()) for i in range(6)])
    work = [block.modes["reverse"].work or 0.0 for block in measure(stack, torch.randn(8, 16)).blocks]
    assert work[2] == work[4] < work[1] == work[3]


def noisy(chain: ChainCost, seed: int) -> ChainCost:
    """The same chain, timed on a machine that others use."""
    draw = torch.Generator().manual_seed(seed)

    def shaken(modes: dict[Any, ModeCost]) -> dict[Any, ModeCost]:
        return {
            name: replace(cost, seconds=cost.seconds * float(0.2 + 2 * torch.rand((), generator=draw)))
            for name, cost in modes.items()
        }

    blocks = tuple(replace(block, modes=shaken(block.modes)) for block in chain.blocks)
    return replace(chain, blocks=blocks, last=shaken(chain.last))


def test_noise_in_the_times_does_not_change_the_plan(deep: ChainCost) -> None:
    least, most = smallest(deep), predict(deep, ["store"] * 12).peak
    for budget in range(least, most, (most - least) // 7):
        plans = {cheapest(noisy(deep, seed), budget) for seed in range(5)}
        assert len(plans) == 1


def test_two_measurements_of_equal_models_give_equal_plans(deep: ChainCost) -> None:
    chains = [deep, measure(*converted(depth=12, rows=512)[::2])]
    least, most = smallest(chains[0]), predict(chains[0], ["store"] * 12).peak
    for share in (0.0, 0.2, 0.5, 0.8):
        plans = {cheapest(chain, int(least + share * (most - least))) for chain in chains}
        assert len(plans) == 1


def test_equal_blocks_get_a_plain_plan_and_no_patchwork(deep: ChainCost) -> None:
    least, most = smallest(deep), predict(deep, ["store"] * 12).peak
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        memory = cheapest(deep, int(least + share * (most - least)))
        assert memory is not None
        changes = sum(a != b for a, b in itertools.pairwise(memory))
        assert changes <= 2, memory


def test_a_change_of_mode_must_be_worth_it() -> None:
    modes: dict[Any, ModeCost] = {
        "store": ModeCost(1.0, 10, 0, 0, 0, 0, work=1.0),
        "checkpoint": ModeCost(1.3, 1, 1, 0, 0, 0, work=1.3),
        "reverse": ModeCost(1.3, 0, 0, 0, 0, 0, work=1.301),
    }
    chain = ChainCost((BlockCost(1, 0, modes),) * 8, 0)
    assert len(set(cheapest(chain, 5) or ())) == 2, "as much of the slightly cheaper mode as fits"
    assert cheapest(replace(chain, change=0.08), 5) == ("reverse",) * 8


def test_a_replay_is_never_predicted_faster_than_storing(deep: ChainCost) -> None:
    slow: dict[Any, ModeCost] = {
        "store": ModeCost(2.0, 10, 0, 0, 0, 0, work=2.0),
        "reverse": ModeCost(1.0, 0, 0, 0, 0, 0, work=1.0),
    }
    chain = ChainCost((BlockCost(1, 0, slow),) * 4, 0, last=slow)
    scaled = chain.with_steps({"store": 8.0, "reverse": 5.0})
    for memory in (["reverse"] * 4, ["store", "reverse"] * 2):
        assert predict(scaled, memory).seconds >= predict(scaled, ["store"] * 4).seconds
    for block in (*deep.blocks, BlockCost(0, 0, deep.last)):
        store = block.modes[STORE.name]
        assert all(cost.seconds >= store.seconds for cost in block.modes.values())
        assert all((cost.work or 0) >= (store.work or 0) for cost in block.modes.values())


def two_modes() -> ChainCost:
    """Storing a block needs 10 bytes, reversing none."""
    modes: dict[Any, ModeCost] = {
        "store": ModeCost(1.0, 10, 0, 0, 0, 0),
        "reverse": ModeCost(2.0, 0, 0, 0, 0, 0),
    }
    return ChainCost((BlockCost(1, 0, modes),) * 8, 5)


def test_a_plan_that_breaks_its_budget_when_it_is_run_is_exchanged_for_one_that_does_not() -> None:
    tried: list[int] = []

    def real_peak(planned: Any) -> int:
        tried.append(planned.peak)
        return int(planned.peak) + 7

    planned = _verified(two_modes(), 60, real_peak)
    assert tried[0] > 53
    assert planned.peak + 7 == planned.measured_peak
    assert planned.measured_peak <= 60


def test_a_budget_that_every_plan_breaks_when_it_is_run_is_an_error() -> None:
    with pytest.raises(BudgetError) as error:
        _verified(two_modes(), 60, lambda planned: planned.peak + 100)
    assert error.value.minimum == 105, "what the smallest plan needed when it was run"


def test_what_was_predicted_otherwise_than_measured_is_said() -> None:
    rows = [
        Row("store", "", 100, 1.0, 101, 1.0),
        Row("reverse", "", 100, 1.6, 60, 0.68),
        Row("this budget's plan", "", 130, 1.0, None, None),
    ]
    comparison = Comparison(tuple(rows), two_modes(), budget=120)
    assert comparison.disagreements() == [
        "reverse: prediction and measurement disagree. The peak is 100 B, where 60 B was predicted.",
        "reverse: prediction and measurement disagree. The time is x1.60, where x0.68 was predicted.",
    ]
    assert all(sentence in comparison.table() for sentence in comparison.disagreements())
    assert "breaks its budget" in (comparison.broken_budget() or "")
    assert replace(comparison, budget=130).broken_budget() is None


def test_the_words_of_the_table_are_explained_below_it() -> None:
    model, _, x = converted(depth=4)
    table = compare(model, x, plan(model, x, "1GiB")).table()
    for row in ("store", "checkpoint each block", "checkpoint √n", "reverse"):
        assert f"\n{row}: " in table


def test_every_registered_mode_of_a_block_is_counted(deep: ChainCost) -> None:
    modes = deep.blocks[3].modes
    assert set(modes) <= set(MODES)
    assert (modes["checkpoint"].work or 0) > (modes["store"].work or 0)
    assert (modes["reverse"].work or 0) > (modes["store"].work or 0)
