"""Plans of models that backend="retrograde" compiles: measured compiled, within the budget, and monotone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.engine.torch_internals import VERSION
from retrograde.memory import Plan
from retrograde.planning import BudgetError, plan
from retrograde.planning._compiled import is_compiled_by_us, measured_compiled, most_stored

pytestmark = [
    pytest.mark.skipif(VERSION < (2, 13), reason='backend="retrograde" needs torch 2.13'),
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit.script.* is deprecated:DeprecationWarning",  # torch's own, when it loads its compiler
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the tracer looks at every attribute
        "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",  # the tracer does
    ),
]

WIDTH, DEPTH = 16, 4


def stack_of(depth: int = DEPTH) -> rg.ReversibleSequence:
    torch.manual_seed(0)

    def branch() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    return rg.ReversibleSequence([rg.two_stream(branch(), branch()) for _ in range(depth)])


def stored(plan: Plan) -> int:
    return sum(mode == "store" for mode in plan.memory)


def test_a_compiled_model_gets_the_plan_that_stores_most_within_the_budget() -> None:
    """Peaks are those of compiled steps; a larger budget stores no less; too small a budget names the least."""
    from compiling import ByRule

    stack, x, backend = stack_of(), torch.randn(256, WIDTH), ByRule()
    model = torch.compile(stack, backend=backend)
    assert isinstance(model, nn.Module)
    everything = plan(model, x, "1GiB")
    assert everything.plan == Plan.uniform("store", DEPTH)
    assert everything.ratio == 1
    assert backend.graphs > 2, "measured compiled, under several plans"
    least = everything.minimum
    budget = (least + everything.peak) // 2
    some = plan(model, x, budget)
    assert some.measured_peak is not None
    assert least <= some.measured_peak == some.peak <= budget
    assert 0 < stored(some.plan) < DEPTH
    assert some.plan.memory == ("reverse",) * (DEPTH - stored(some.plan)) + ("store",) * stored(some.plan)
    assert stack.memory == Plan.uniform("reverse", DEPTH), "it is returned, not applied"
    stack.memory = some.plan
    assert measured_compiled(model, x).peak <= budget
    stack.memory = "reverse"  # type: ignore[assignment]
    with pytest.raises(BudgetError) as error:
        plan(model, x, least // 2)
    assert error.value.minimum == least


@pytest.mark.parametrize(
    "peak", [lambda k: 10 + 3 * k, lambda k: 10 + k * k, lambda k: 10 + max(0, k - 3), lambda k: 10]
)
def test_the_search_finds_the_most_stored_blocks_for_every_budget(peak: Callable[[int], int]) -> None:
    for budget in range(10, 10 + 60 * 60, 7):
        asked: list[int] = []

        def ask(count: int, asked: list[int] = asked) -> int:
            asked.append(count)
            return peak(count)

        assert most_stored(48, budget, ask) == max(k for k in range(49) if peak(k) <= budget)
        assert len(set(asked)) <= 11


def test_only_models_compiled_by_our_backend_are_measured_compiled() -> None:
    from retrograde.compiled.backend import backend

    def made(compiles: Any) -> bool:
        stack = stack_of(1)
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), stack)
        compiled = compiles(model)
        return is_compiled_by_us(model if compiled is None else compiled, stack)

    assert made(lambda model: torch.compile(model, backend=backend))
    assert made(lambda model: model.compile(backend="retrograde"))
    assert made(lambda model: nn.Sequential(torch.compile(model, backend="retrograde")))
    assert not made(lambda model: torch.compile(model, backend="aot_eager"))
    assert not made(lambda model: model[0].compile(backend="retrograde"))
    assert not made(lambda model: None)
