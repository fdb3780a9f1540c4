"""Plans for a model: the fastest within a budget, or at each of several budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from retrograde.engine.preserve import preserve
from retrograde.measure.finite import check_step
from retrograde.measure.formatting import format_bytes, parse_size
from retrograde.measure.free_memory import has_room
from retrograde.measure.loss import Loss
from retrograde.measure.stacks import the_stack
from retrograde.measure.timing import Progress, silent
from retrograde.memory import Mode, Plan
from retrograde.sequence import ReversibleSequence

from ._compiled import CompiledSteps, is_compiled_by_us, most_stored, storing_last
from ._costs import ChainCost, predict
from ._measure import following, measure, measured
from ._search import cheapest, smallest

if TYPE_CHECKING:
    from .on_paper import Device, JobPlan

_ATTEMPTS = 4  # to find a plan whose real step is within the budget


class BudgetError(ValueError):
    """No plan fits the budget. `minimum` is the smallest budget, in bytes, that a plan fits."""

    def __init__(self, budget: int, minimum: int) -> None:
        super().__init__(
            f"No plan fits {format_bytes(budget)}: the least that this model needs on this batch is "
            f"{format_bytes(minimum)} ({minimum} bytes). Give that, a smaller batch, or fewer parameters per block."
        )
        self.minimum = minimum


@dataclass(frozen=True)
class Planned:
    """A plan, with its predicted costs and the measurements that it was made from.

    `peak` counts the bytes of everything that a training step (forward and backward) allocates, the parameters'
    gradients included; `ratio` is its time, relative to the time with everything stored. `measured_peak` is that of a
    real step under the plan, where there was room for one: it is within the `budget`.

    For a compiled model all figures are measured, `chain` is None, and `ratio` is NaN if there is no room to store all.
    """

    plan: Plan
    peak: int
    seconds: float
    ratio: float
    minimum: int
    chain: ChainCost | None
    budget: int | None = None
    measured_peak: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.plan}\npeak {format_bytes(self.peak)} (least possible {format_bytes(self.minimum)}), "
            f"time x{self.ratio:.2f} of storing everything"
        )


@overload
def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    *,
    loss: Loss | None = None,
    stack: str | ReversibleSequence | None = None,
    progress: Progress = silent,
) -> Planned: ...


@overload
def plan(
    model: nn.Module | Callable[..., Any] | str,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    on: str | Device,
    loss: Loss | None = None,
    stack: str | None = None,
    progress: Progress = silent,
    **job: Any,
) -> JobPlan: ...


def plan(
    model: Any,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    on: str | Device | None = None,
    loss: Loss | None = None,
    stack: Any = None,
    progress: Progress = silent,
    **job: Any,
) -> Planned | JobPlan:
    """The fastest plan whose peak memory is within a budget. It is returned, not applied.

    With `on`, it is planned for a device that need not be here: nothing is allocated, `model` may be a factory, and a
    `JobPlan` is returned, with the bytes of a rank and times from a roofline.

    Args:
        model: a model with a `ReversibleSequence` in it, or one itself. Compiled with backend="retrograde", it is
            measured compiled.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budget: bytes, or a text like "2GiB", for everything that a step allocates: activations and the parameters'
            gradients.
        loss: maps the model's output to a scalar; `retrograde.measure.default_loss` by default.
        stack: which stack to plan, if the model has several: its name in the model, or itself.
        progress: called with what is being measured.
        on: the name of a device ("h100-80gb"), "this" for the machine at hand, a JSON file, or a `Device`. The budget
            is then for everything that a rank holds, parameters and optimiser included; by default all of its memory.
        job: with `on`: `ranks`, `shard`, `optimizer`, `fused`, `precision`, `micro_batches`, `stage`; see `Job`.

    Raises:
        BudgetError: no plan fits (without `on`); the error names the smallest budget that one fits.
        ValueError: the model makes NaN, or is on the meta device, so that nothing can be measured.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.planning import plan
        >>> layers = [(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(8)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> planned = plan(stack, torch.randn(512, 64), "8MiB")
        >>> stack.memory = planned.plan
        >>> planned.peak <= 8 * 2**20
        True
    """
    if on is not None:
        from .on_paper import plan_on

        return plan_on(on, model, batch, budget, loss=loss, stack=stack, progress=progress, **job)
    if job or budget is None:
        wrong = (
            f"{', '.join(job)} only have a meaning with on=..., the device to plan for"
            if job
            else "a budget is missing"
        )
        raise TypeError(f"plan: {wrong}.")
    size = parse_size(budget)
    stack = the_stack(getattr(model, "_orig_mod", model), stack)
    if is_compiled_by_us(model, stack):
        return _plan_compiled(CompiledSteps(model, batch, stack, loss=loss, progress=progress), size)
    check_step(model, batch, loss)
    chain = measure(model, batch, loss=loss, stack=stack, progress=progress)

    def real_peak(planned: Planned) -> int | None:
        if not has_room(model, planned.peak):
            return None
        progress("the peak of the plan", 0, 1)
        with preserve(model), following(stack, planned.plan):
            return measured(model, batch, loss=loss).peak

    return _verified(chain, size, real_peak)


def _plan_compiled(steps: CompiledSteps, budget: int) -> Planned:
    """The fastest plan of those that store the last blocks. See NOTE [Plans of compiled models]."""
    blocks, least = len(steps.stack), steps[0].peak
    if least > budget:
        raise BudgetError(budget, least)
    stored = most_stored(blocks, budget, lambda count: steps[count].peak)
    peak, seconds = steps[stored]
    is_known = blocks in steps.steps or has_room(steps.stack, peak + (blocks - stored) * (steps[1].peak - least))
    ratio = seconds / steps[blocks].seconds if is_known else math.nan
    return Planned(storing_last(steps.stack, stored), peak, seconds, ratio, least, None, budget, peak)


def _verified(chain: ChainCost, budget: int, real_peak: Callable[[Planned], int | None]) -> Planned:
    """The fastest plan whose real step is within the budget: where one is not, the next must need so much less.

    Args:
        real_peak: the peak of a step under a plan; None if there is no room for it.
    """
    least = smallest(chain)
    limit = max(budget, least)
    for attempt in range(_ATTEMPTS):
        planned = replace(choose(chain, limit), budget=budget)
        peak = real_peak(planned)
        needed = max(planned.peak, peak or 0)
        if needed <= budget:
            return replace(planned, measured_peak=peak)
        if limit == least:
            break
        limit = least if attempt == _ATTEMPTS - 2 else max(least, limit - (needed - budget))
    raise BudgetError(budget, needed)


def choose(chain: ChainCost, budget: int) -> Planned:
    """The fastest plan within a budget, from costs that `measure` returned."""
    minimum = smallest(chain)
    memory = cheapest(chain, budget) if budget >= minimum else None
    if memory is None:
        raise BudgetError(budget, minimum)
    return _planned(chain, memory, minimum)


def pareto(chain: ChainCost, points: int = 24) -> list[Planned]:
    """The fastest plan at each of several budgets, from the smallest possible one to that of storing everything.

    Only those that are predicted to be faster than every smaller one.
    """
    minimum = smallest(chain)
    most = predict(chain, ["store"] * len(chain.blocks)).peak
    plans: dict[tuple[Mode, ...], Planned] = {}
    for i in range(points):
        budget = max(minimum, int(minimum * (max(most, minimum) / minimum) ** (i / (points - 1))))
        memory = cheapest(chain, budget)
        if memory is not None:
            plans.setdefault(memory, _planned(chain, memory, minimum))
    curve: list[Planned] = []
    for planned in sorted(plans.values(), key=lambda planned: (planned.peak, planned.seconds)):
        if not curve or planned.seconds < curve[-1].seconds:
            curve.append(planned)
    return curve


def _planned(chain: ChainCost, memory: tuple[Mode, ...], minimum: int) -> Planned:
    peak, seconds = predict(chain, memory)
    stored = predict(chain, ["store"] * len(chain.blocks)).seconds
    return Planned(Plan(memory, chain.anchors), peak, seconds, seconds / stored, minimum, chain)
