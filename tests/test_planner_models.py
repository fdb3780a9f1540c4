"""The planner on models of every kind: what it predicts is what a real step needs, and the comparison runs on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.planning import ChainCost, _measure, compare, measure, measured, plan, predict

WIDTH, ROWS, DEPTH = 32, 256, 6
Made = tuple[nn.Module, rg.ReversibleSequence, Tensor]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def stack_of(first: Callable[[], Any] = mlp, **options: Any) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence([rg.two_stream(first(), mlp()) for _ in range(DEPTH)], **options)


def alone(stack: rg.ReversibleSequence, rows: int = ROWS) -> Made:
    return stack, stack, torch.randn(rows, WIDTH)


class Reading(nn.Module):
    """A branch that takes context."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        mixed: Tensor = self.mlp(x) + self.read(encoded)
        return mixed


class Around(nn.Module):
    """A stack inside a model: with context that the model computes, under autocast, or called more than once."""

    def __init__(self, stack: rg.ReversibleSequence, kind: str) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.stack = stack
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind == "twice":
            return self.stack(self.stack(self.encode(x)))
        if self.kind == "context":
            return self.stack(x, encoded=self.encode(x))
        if self.kind == "hidden":
            outputs = self.stack.run(self.encode(x), hidden=[2])
            return outputs[0] + outputs.hidden[2][0]
        with torch.autocast("cpu", torch.bfloat16):
            return self.stack(self.encode(x))


def around(kind: str, first: Callable[[], Any] = mlp) -> Made:
    model = Around(stack_of(first), kind)
    return model, model.stack, torch.randn(ROWS, WIDTH)


class Balanced(nn.Module):
    """A branch with an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        update = self.mlp(x)
        return update, update.square().mean()


def with_losses() -> Made:
    blocks = [rg.Block(rg.Step(Balanced(), 0, 1, aux="loss"), rg.Step(mlp(), 1, 0)) for _ in range(DEPTH)]
    return alone(rg.ReversibleSequence(blocks))


def tied() -> Made:
    shared = mlp()
    return alone(stack_of(lambda: shared), rows=16)  # few rows: gradients are most of the peak


def partly_frozen() -> Made:
    stack = stack_of()
    stack.requires_grad_(False)
    stack.blocks[DEPTH // 2].requires_grad_(True)
    return alone(stack)


def without_names() -> Made:
    """Branches that are functions, of which one is dear, and which nothing but their code tells apart."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(DEPTH)]

    def cheap(i: int) -> Any:
        return lambda x: x @ weights[i]

    def dear(i: int) -> Any:
        return lambda x: (x @ weights[i]).repeat(1, 8).tanh().sin().exp().unflatten(1, (8, WIDTH)).mean(1)

    blocks = [rg.two_stream((dear if i % 2 else cheap)(i), mlp()) for i in range(DEPTH)]
    return alone(rg.ReversibleSequence(blocks))


class Wide(nn.Module):
    """A branch whose cost is in a plain attribute."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).repeat(1, self.times).tanh().sin().unflatten(1, (self.times, WIDTH)).mean(1)


def by_attribute() -> Made:
    sizes = iter([1, 6] * DEPTH)
    return alone(stack_of(lambda: Wide(next(sizes))))


MODELS: dict[str, Callable[[], Made]] = {
    "dropout": lambda: alone(stack_of(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))),
    "exact": lambda: alone(stack_of(exact=True)),
    "context": lambda: around("context", Reading),
    "autocast": lambda: around("autocast"),
    "auxiliary losses": with_losses,
    "tied": tied,
    "partly frozen": partly_frozen,
    "functions": without_names,
    "attributes": by_attribute,
}
PLANS: dict[str, rg.Plan] = {
    "store": rg.Plan(("store",) * DEPTH),
    "checkpoint": rg.Plan(("checkpoint",) * DEPTH),
    "reverse": rg.Plan(("reverse",) * DEPTH),
    "offload": rg.Plan(("offload",) * DEPTH),
    "partial": rg.Plan(("partial",) * DEPTH),
    "by turns": rg.Plan(("checkpoint", "reverse", "store") * 2),
    "stored first": rg.Plan(("store",) * 2 + ("reverse",) * 4),
    "anchors": rg.Plan(("reverse",) * DEPTH, anchors={3}),
    "anchored after a stored block": rg.Plan(("store", "store", "reverse", "reverse", "reverse", "reverse"), {2}),
}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on how often a block's time is taken."""
    monkeypatch.setattr(_measure, "_PATIENCE", 0.0)


measured_once: dict[str, tuple[Made, ChainCost]] = {}


def costs_of(name: str) -> tuple[Made, ChainCost]:
    if name not in measured_once:
        made = MODELS[name]()
        measured_once[name] = made, measure(made[0], made[2], stack=made[1])
    return measured_once[name]


@pytest.mark.parametrize("memory", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_peak_is_within_5_percent_of_the_measured_one(name: str, memory: str) -> None:
    (model, stack, batch), chain = costs_of(name)
    chosen = PLANS[memory]
    stack.memory = chosen
    expected = predict(replace(chain, anchors=chosen.anchors), chosen.memory)
    assert expected.peak == pytest.approx(measured(model, batch).peak, rel=0.05)


@pytest.mark.parametrize("name", ["auxiliary losses", "hidden states", "context", "exact"])
def test_a_plan_is_compared_with_every_way_to_do_without_one(name: str) -> None:
    model, stack, batch = around("hidden") if name == "hidden states" else MODELS[name]()
    found = compare(model, batch, plan(model, batch, "1GiB"), stack=stack)
    ways = ["store", "checkpoint each block", "checkpoint √n", "reverse", "this budget's plan"]
    assert [row.name for row in found.rows] == ways
    peaks = {row.name: row.peak for row in found.rows}
    assert peaks["reverse"] < peaks["checkpoint √n"] < peaks["store"]
    assert {row.name: row.ratio for row in found.rows}["store"] == 1
    assert stack.memory == PLANS["reverse"], "the stack is left with the memory it had"


@pytest.mark.parametrize("memory", ["offload", "partial"])
def test_a_stack_is_planned_whatever_memory_it_has(memory: Any) -> None:
    model, _, batch = alone(stack_of(memory=memory))
    planned = plan(model, batch, "1GiB")
    assert len(planned.plan.memory) == DEPTH
    assert planned.ratio <= 1.0


def test_a_stack_that_is_called_twice_in_a_step_is_refused() -> None:
    model, _, batch = around("twice")
    with pytest.raises(ValueError, match="called its ReversibleSequence 2 times in one step"):
        plan(model, batch, "1GiB")


def test_measuring_leaves_the_graph_of_the_context_alone() -> None:
    """It is computed by the model with weights of its own, and goes through one backward pass a step."""
    model, stack, batch = around("context", Reading)
    planned = plan(model, batch, "1GiB")
    assert planned.chain.context == batch.numel() * batch.element_size()
    assert all(p.grad is None for p in model.parameters())
    stack.memory = planned.plan
    model(batch).sum().backward()
