"""The planner on models of every kind: what it predicts is what a real step needs, and the comparison runs on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.measure import free_memory, timing
from retrograde.planning import ChainCost, Comparison, compare, measure, measured, plan, predict
from retrograde.planning._compare import _in_segments

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
    """Branches that are functions, some of them expensive, which differ in nothing but their code."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(DEPTH)]

    def cheap(i: int) -> Any:
        return lambda x: x @ weights[i]

    def expensive(i: int) -> Any:
        return lambda x: (x @ weights[i]).repeat(1, 8).tanh().sin().exp().unflatten(1, (8, WIDTH)).mean(1)

    blocks = [rg.two_stream((expensive if i % 2 else cheap)(i), mlp()) for i in range(DEPTH)]
    return alone(rg.ReversibleSequence(blocks))


class Wide(nn.Module):
    """A branch whose cost is in a plain attribute."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).repeat(1, self.times).tanh().sin().unflatten(1, (self.times, WIDTH)).mean(1)


class Casting(nn.Module):
    """A branch with an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            update: Tensor = self.mlp(x)
        return update.float()


def by_attribute() -> Made:
    sizes = iter([1, 6] * DEPTH)
    return alone(stack_of(lambda: Wide(next(sizes))))


class ScaleAndShift(nn.Module):
    """A branch of two products for an affine coupling, whose first replay takes more memory than later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale(x).tanh(), self.shift(x)


def affine() -> Made:
    torch.manual_seed(0)
    pairs = [(ScaleAndShift(), ScaleAndShift()) for _ in range(DEPTH)]
    return alone(rg.ReversibleSequence([rg.two_stream(f, g, coupling=rg.couplings.Affine()) for f, g in pairs]))


def exact_momentum() -> Made:
    torch.manual_seed(0)
    return alone(rg.ReversibleSequence([rg.momentum(mlp(), gamma=0.9) for _ in range(DEPTH)], exact=True))


def midpoint() -> Made:
    """Blocks whose input passes through them as one of their outputs."""
    torch.manual_seed(0)
    return alone(rg.ReversibleSequence([rg.midpoint(mlp()) for _ in range(DEPTH)]))


MODELS: dict[str, Callable[[], Made]] = {
    "dropout": lambda: alone(stack_of(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))),
    "exact": lambda: alone(stack_of(exact=True)),
    "context": lambda: around("context", Reading),
    "autocast": lambda: around("autocast"),
    "autocast in branches": lambda: alone(
        rg.ReversibleSequence([rg.two_stream(Casting(), Casting()) for _ in range(DEPTH)])
    ),
    "auxiliary losses": with_losses,
    "tied": tied,
    "partly frozen": partly_frozen,
    "functions": without_names,
    "attributes": by_attribute,
    "affine": affine,
    "exact momentum": exact_momentum,
    "midpoint": midpoint,
}
PLANS: dict[str, rg.Plan] = {
    "store": rg.Plan(("store",) * DEPTH),
    "checkpoint": rg.Plan(("checkpoint",) * DEPTH),
    "reverse": rg.Plan(("reverse",) * DEPTH),
    "offload": rg.Plan(("offload",) * DEPTH),
    "selective": rg.Plan(("selective",) * DEPTH),
    "by turns": rg.Plan(("checkpoint", "reverse", "store") * 2),
    "stored first": rg.Plan(("store",) * 2 + ("reverse",) * 4),
    "anchors": rg.Plan(("reverse",) * DEPTH, anchors={3}),
    "anchored after a stored block": rg.Plan(("store", "store", "reverse", "reverse", "reverse", "reverse"), {2}),
}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on how often a block's time is taken."""
    monkeypatch.setattr(timing, "_PATIENCE", 0.0)


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


def test_the_peak_of_a_single_block_is_predicted() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(mlp(), mlp())])
    batch = torch.randn(ROWS, WIDTH)
    chain = measure(stack, batch)
    for mode, memory in chain.uniform().items():
        stack.memory = mode
        assert predict(chain, memory).peak == pytest.approx(measured(stack, batch).peak, rel=0.05), mode


def test_a_batch_keeps_its_graph_and_gets_no_gradient() -> None:
    """Users plan with what their training script has: the output of an embedding, an input with a gradient."""
    embed, stack = nn.Linear(WIDTH, WIDTH), stack_of(Reading)
    batch = embed(torch.randn(ROWS, WIDTH))
    encoded = torch.randn(ROWS, WIDTH, requires_grad=True)
    model = Around(stack, "context")
    model.forward = lambda x, encoded: stack(x, encoded=encoded)  # type: ignore[method-assign]
    compare(model, (batch, encoded), plan(model, (batch, encoded), "1GiB"))
    assert encoded.grad is None
    batch.sum().backward()
    assert embed.weight.grad is not None


@dataclass
class Output:
    logits: Tensor
    hidden: Any = None


def test_a_model_may_return_a_dataclass() -> None:
    model, _, batch = around("hidden")
    plain = measure(model, batch)
    with model.register_forward_hook(lambda _, __, output: Output(output)):
        assert [b.modes["store"].saved for b in measure(model, batch).blocks] == [
            b.modes["store"].saved for b in plain.blocks
        ]


NOTHING_TO_TRAIN: dict[str, tuple[Any, str]] = {
    "a vector": (lambda y: y.mean(0), r"The loss is a tensor of shape \(32,\)"),
    "a float": (lambda y: y.mean().item(), "The loss is a float"),
    "without grad": (lambda y: y.mean().detach(), "The loss does not require grad"),
    "of something else": (lambda y: torch.ones((), requires_grad=True), "does not reach the ReversibleSequence"),
    "of a frozen model": (None, "The loss does not require grad"),
    "of whole numbers": (None, "a value of type Tensor without a floating-point tensor"),
}


@pytest.mark.parametrize("case", NOTHING_TO_TRAIN)
def test_a_step_that_trains_nothing_in_the_stack_is_refused(case: str) -> None:
    model, _, batch = around("hidden")
    model.requires_grad_(case != "of a frozen model")
    if case == "of whole numbers":
        model.register_forward_hook(lambda _, __, output: output.argmax(-1))
    loss, sentence = NOTHING_TO_TRAIN[case]
    with pytest.raises(ValueError, match=sentence):
        plan(model, batch, "1GiB", loss=loss)


@pytest.mark.parametrize("name", ["auxiliary losses", "hidden states", "context", "exact"])
def test_a_plan_is_compared_with_every_way_to_do_without_one(name: str) -> None:
    model, stack, batch = around("hidden") if name == "hidden states" else MODELS[name]()
    comparison = compare(model, batch, plan(model, batch, "1GiB"), stack=stack)
    ways = ["store", "checkpoint each block", "checkpoint √n", "reverse", "this budget's plan"]
    assert [row.name for row in comparison.rows] == ways
    rows = {row.name: row for row in comparison.rows}
    assert rows["reverse"].peak < rows["checkpoint √n"].peak < rows["store"].peak
    assert rows["checkpoint √n"].plan == "blocks 0-5 checkpoint every 2 blocks"
    assert rows["store"].ratio == 1
    assert stack.memory == PLANS["reverse"], "the stack is left with the memory it had"


def test_a_checkpoint_of_several_blocks_gives_the_gradients_of_storing_everything() -> None:
    """On a grid too, to which streams return after a stage transition in the middle of a segment."""
    torch.manual_seed(0)
    blocks = [rg.two_stream(mlp(), nn.Sequential(mlp(), nn.Dropout(0.5))) for _ in range(9)]
    blocks[4] = rg.transition(mlp(), mlp())
    stack = rg.ReversibleSequence(blocks, exact=True)
    x = torch.randn(8, WIDTH)
    segments = _in_segments(stack)
    assert str(segments) == "blocks 0-8 checkpoint every 3 blocks; anchors before 5"
    gradients = []
    for memory in ("store", segments):
        torch.manual_seed(1)
        stack.zero_grad()
        stack(x, memory=memory).square().sum().backward()
        gradients.append([p.grad for p in stack.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_checkpoints_of_the_root_of_the_depth_need_less_than_checkpoints_of_all_blocks() -> None:
    """Where streams are most of the memory: n inputs against √n inputs and √n graphs."""
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(64)])
    x = torch.randn(2048, 8)
    peaks = []
    for memory in ("store", "checkpoint", _in_segments(stack)):
        stack.memory = memory
        peaks.append(measured(stack, x).peak)
    assert peaks[2] < 0.5 * min(peaks[:2])


def test_ways_without_room_are_predicted_and_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that is out of memory is killed, and those who plan are those whose model does not fit."""
    model, stack, batch = alone(stack_of(), rows=4096)
    chain = measure(model, batch)
    reverse, store = (predict(chain, [mode] * DEPTH).peak for mode in ("reverse", "store"))
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: (reverse + store) // 2)
    ran: set[tuple[str, ...]] = set()
    with stack.register_forward_pre_hook(lambda *_: ran.add(stack.memory.memory)):
        planned = plan(model, batch, (reverse + store) // 3)
        comparison = compare(model, batch, planned, stack=stack)
    assert planned.plan.memory in ran
    assert ("store",) * DEPTH not in ran
    rows = {row.name: row for row in comparison.rows}
    assert (rows["store"].peak, rows["store"].ratio, rows["store"].predicted_ratio) == (None, None, 1.0)
    assert rows["store"].predicted_peak == pytest.approx(store, rel=0.01)
    assert rows["reverse"].peak == pytest.approx(reverse, rel=0.05)
    assert (rows["reverse"].ratio or 0) > 0
    assert "no room" in next(line for line in comparison.table().splitlines() if line.startswith("store"))
    assert comparison.plot(tmp_path / "curve.png").stat().st_size > 10_000


def test_a_changed_speed_of_the_machine_is_reported() -> None:
    model, stack, batch = alone(stack_of())
    planned = plan(model, batch, "1GiB")
    steady = Comparison((), planned.chain, slowdown=1.05)
    assert "changed" not in steady.table()
    assert "machine changed: storing everything took x1.88" in replace(steady, slowdown=1.88).table()
    assert "x0.50" in replace(steady, slowdown=0.5).table()
    before = replace(planned, chain=planned.chain.with_steps(dict.fromkeys(planned.chain.uniform(), 1e-9)))
    assert compare(model, batch, before, stack=stack).slowdown > 1000


def test_a_model_that_gives_its_stack_a_memory_in_the_call_is_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack_of()

        def forward(self, x: Tensor) -> Any:
            return self.stack(x, memory="checkpoint")

    with pytest.raises(ValueError, match=r"a memory of its own in the call .* would not be followed"):
        plan(Fixed(), torch.randn(ROWS, WIDTH), "1GiB")


def test_a_plan_has_the_anchors_of_a_tolerance_and_leaves_their_placing_to_training() -> None:
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.momentum(mlp(), gamma=0.1) for _ in range(DEPTH)], max_drift=1e-6)
    batch = torch.randn(ROWS, WIDTH)
    anchors = plan(stack, batch, "1GiB").plan.anchors
    assert anchors
    assert not stack.memory.anchors
    stack(batch)
    assert stack.memory.anchors == anchors


@pytest.mark.parametrize("memory", ["offload", "selective"])
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
    """The model computes it with weights of its own, and it goes through one backward pass per step."""
    model, stack, batch = around("context", Reading)
    planned = plan(model, batch, "1GiB")
    assert planned.chain.context == batch.numel() * batch.element_size()
    assert all(p.grad is None for p in model.parameters())
    stack.memory = planned.plan
    model(batch).sum().backward()
