"""Plans for a model: measured, searched, and held against a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from retrograde._plan import Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde._streams import Streams
from retrograde.diagnose import MemoryTracker

from ._batches import arguments, tensors_in
from ._costs import BlockCost, ChainCost, predict
from ._measure import Progress, Surroundings, measure_blocks
from ._room import has_room
from ._search import cheapest, smallest
from ._sizes import parse_size, show_size
from ._steps import least_seconds, loss_of, mean_square, planned_as, timed, undisturbed


class BudgetError(ValueError):
    """No plan fits the budget. `minimum` is the least number of bytes that one fits."""

    def __init__(self, budget: int, minimum: int) -> None:
        super().__init__(
            f"No plan fits {show_size(budget)}: the least that this model needs on this batch is "
            f"{show_size(minimum)} ({minimum} bytes). Give that, a smaller batch, or fewer parameters per block."
        )
        self.minimum = minimum


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from.

    `peak` counts the bytes of all tensors that a training step (forward and backward) makes beyond those that were
    there before, the parameters' gradients among them; `ratio` is its time in units of the time with everything stored.
    """

    plan: Plan
    peak: int
    seconds: float
    ratio: float
    minimum: int
    chain: ChainCost

    def __str__(self) -> str:
        return (
            f"{self.plan}\npeak {show_size(self.peak)} (least possible {show_size(self.minimum)}), "
            f"time x{self.ratio:.2f} of storing everything"
        )


def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    *,
    loss: Any = None,
    stack: ReversibleSequence | None = None,
    progress: Progress | None = None,
) -> Planned:
    """The plan with the least time whose peak of memory is within a budget. It is returned, not applied.

    Args:
        model: a model with a `ReversibleSequence` in it, or one itself.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budget: bytes, or a text like "2GiB", for all that a step makes: activations and the parameters' gradients.
        loss: maps the model's output to a scalar; the mean square of its tensors unless given.
        stack: which stack to plan, if the model has several.
        progress: told what is being measured.

    Raises:
        BudgetError: no plan fits; the error names the least budget that one fits.

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
    size = parse_size(budget)
    chain = measure(model, batch, loss=loss, stack=stack, progress=progress)
    return choose(chain, size)


def choose(chain: ChainCost, budget: int) -> Planned:
    """The fastest plan within a budget, from costs that were measured before."""
    minimum = smallest(chain)
    memory = cheapest(chain, budget) if budget >= minimum else None
    if memory is None:
        raise BudgetError(budget, minimum)
    return _planned(chain, memory, minimum)


def pareto(chain: ChainCost, points: int = 24) -> list[Planned]:
    """The fastest plan at each of several budgets, from the least that is possible to that of storing everything."""
    minimum = smallest(chain)
    most = predict(chain, ["store"] * len(chain.blocks)).peak
    found: dict[tuple[Memory, ...], Planned] = {}
    for i in range(points):
        budget = max(minimum, int(minimum * (max(most, minimum) / minimum) ** (i / (points - 1))))
        memory = cheapest(chain, budget)
        if memory is not None:
            found.setdefault(memory, _planned(chain, memory, minimum))
    return sorted(found.values(), key=lambda planned: planned.peak)


def _planned(chain: ChainCost, memory: tuple[Memory, ...], minimum: int) -> Planned:
    peak, seconds = predict(chain, memory)
    stored = predict(chain, ["store"] * len(chain.blocks)).seconds
    return Planned(Plan(memory, chain.anchors), peak, seconds, seconds / stored, minimum, chain)


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Any = None,
    stack: ReversibleSequence | None = None,
    progress: Progress | None = None,
) -> ChainCost:
    """What every block of a model's stack costs in each memory mode, and what surrounds the stack."""
    stack = the_stack(model) if stack is None else stack
    loss = loss or mean_square
    with undisturbed(model):
        around = _measure_around(model, batch, stack, loss)
        blocks, last, outputs = measure_blocks(stack, around.streams, around.surroundings, progress)
    used = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}.values())
    if not around.made and not stack.exact:  # streams that are put on a grid are the stack's own
        if len(blocks) == 1:
            last = _given(replace(blocks[0], modes=last)).modes
        blocks[0] = _given(blocks[0])
    chain = ChainCost(
        tuple(blocks), used, around.before, around.head_peak, 0, 0.0, stack.memory.anchors, last,
        sum(t.numel() * t.element_size() for t in around.surroundings.leaves()),
    )  # fmt: skip
    cached = sum(chain.mode(i, mode).cached for i, mode in enumerate(stack.memory.memory))  # gone by the backward pass
    chain = replace(
        chain,
        head_left=max(0, around.head_left + cached),
        head_backward=max(0, around.head_backward + cached),
    )
    with undisturbed(model):
        return chain.with_steps(_uniform_steps(model, batch, stack, loss, chain, progress))


def _uniform_steps(
    model: nn.Module, batch: Any, stack: ReversibleSequence, loss: Any, chain: ChainCost, progress: Progress | None
) -> dict[Memory, float]:
    """The seconds of whole steps with all blocks in one mode, for each mode that there is room for."""
    fitting = {mode: plan for mode, plan in chain.uniform().items() if has_room(model, predict(chain, plan).peak)}
    ways = {mode: partial(planned_as, stack, Plan(plan, chain.anchors)) for mode, plan in fitting.items()}
    return least_seconds(ways, partial(timed, model, batch, loss), progress)


def _given(block: BlockCost) -> BlockCost:
    """The costs of a first block whose input is part of the batch: it costs nothing to keep it."""
    modes = {
        name: replace(
            mode,
            held=max(0, mode.held - mode.kept_input),  # an input that passes through counts as an output
            kept_input=0,
            forward_peak=mode.forward_peak - block.streams,
            backward_peak=mode.backward_peak - mode.kept_input,
        )
        for name, mode in block.modes.items()
    }
    return BlockCost(0, block.gradients, modes)


def the_stack(model: nn.Module) -> ReversibleSequence:
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, ReversibleSequence)}
    if not stacks:
        raise ValueError(f"{type(model).__name__} has 0 ReversibleSequences, where a plan is for one: put one into it.")
    if len(stacks) > 1:
        names = ", ".join(name or "the model itself" for name in stacks)
        raise ValueError(
            f"The model has {len(stacks)} ReversibleSequences, where a plan is for one: {names}. Choose it with "
            "stack=model.get_submodule(name); on the command line, with --stack name."
        )
    return next(iter(stacks.values()))


@dataclass(frozen=True)
class _Around:
    """What a run of the whole model shows of what surrounds the stack."""

    streams: Streams
    surroundings: Surroundings
    before: int  # without the streams
    made: int  # bytes of the streams that the model made, and did not get with its batch
    head_peak: int
    head_left: int  # this and the next in relation to what was alive after the stack, which may be more
    head_backward: int


def _measure_around(model: nn.Module, batch: Any, stack: ReversibleSequence, loss: Any) -> _Around:
    """Run the model once for bytes, with a look when the stack begins, ends, and is entered by the backward pass."""
    seen: dict[str, Any] = {}
    tracker = MemoryTracker(ignore=[model, *tensors_in(arguments(batch))])
    with tracker as memory, _observed(stack, memory, seen), memory.phase("outside") as outside:
        seen["phase"] = outside
        end = loss_of(model, batch, loss)
        seen["head_peak"], outside.peak = outside.peak, memory.live
        end.backward()
    if "streams" not in seen:
        raise ValueError("The model did not call its ReversibleSequence on this batch, so there is nothing to plan.")
    if seen["calls"] > 1:
        raise ValueError(
            f"The model called its ReversibleSequence {seen['calls']} times in one step, and what it needs is measured "
            "for one call. Plan each call as a stack of its own, or choose its memory by hand."
        )
    if "entered" not in seen:
        raise ValueError(
            "The backward pass does not reach the ReversibleSequence, so there is nothing to plan: the loss does not "
            "depend on its outputs, or nothing in it or before it requires grad."
        )
    return _Around(
        seen["streams"], seen["surroundings"], seen["before"] - seen["made"], seen["made"],
        max(0, seen["head_peak"] - seen["after"]),
        seen["entered"] - seen["after"],
        seen["head_backward"] - seen["after"],
    )  # fmt: skip


@contextmanager
def _observed(stack: ReversibleSequence, memory: MemoryTracker, seen: dict[str, Any]) -> Iterator[None]:
    original = stack._drive

    def entered(grad: Tensor) -> None:
        if "entered" not in seen:
            seen["entered"] = memory.live - grad.untyped_storage().nbytes()
            seen["head_backward"] = seen["phase"].peak

    def observed(plan: Plan, streams: Streams, context: Mapping[str, Any], hidden: set[int]) -> Any:
        if plan != stack.memory:
            raise ValueError(
                "The model gives its ReversibleSequence a memory of its own in the call (memory=...), so that a plan "
                "assigned to the stack would not be followed. Take it out of the call while you plan."
            )
        seen["calls"] = seen.get("calls", 0) + 1
        seen["streams"] = tuple(s.detach().requires_grad_(s.requires_grad) for s in streams)
        seen["surroundings"] = Surroundings.of_call(stack.names, streams, context)
        seen["before"], seen["made"] = memory.live, memory.counts(*streams)
        outputs = original(plan, streams, context, hidden)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(entered)
        seen["after"] = memory.live
        seen["phase"].peak = memory.live
        return outputs

    with driven_by(stack, observed):
        yield


@contextmanager
def driven_by(stack: ReversibleSequence, drive: Callable[..., Any]) -> Iterator[None]:
    """Let the calls of a stack run another way."""
    object.__setattr__(stack, "_drive", drive)
    try:
        yield
    finally:
        object.__delattr__(stack, "_drive")
