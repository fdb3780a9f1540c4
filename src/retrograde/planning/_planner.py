"""Plans for a model: measured, searched, and held against a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._plan import Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde._streams import Streams
from retrograde.diagnose import MemoryTracker

from ._batches import arguments, tensors_in
from ._costs import BlockCost, ChainCost, Prediction, predict
from ._measure import Progress, Surroundings, measure_blocks, rounds, untouched, wait
from ._search import cheapest, smallest
from ._sizes import parse_size, show_size


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
    stack = _the_stack(model) if stack is None else stack
    with untouched(model), _without_grads(model):
        around = _measure_around(model, batch, stack, loss or mean_square)
        blocks, last, outputs = measure_blocks(stack, around.streams, around.surroundings, progress)
        whole = min(_timed(model, batch, loss or mean_square) for _ in rounds())
    used = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}.values())
    if not around.made and not stack.exact:  # streams that are put on a grid are the stack's own
        blocks[0] = _given(blocks[0])
        last = last if len(blocks) > 1 else {}
    chain = ChainCost(
        tuple(blocks), used, around.before, around.head_peak, 0, 0.0, stack.memory.anchors, last,
        sum(t.numel() * t.element_size() for t in around.surroundings.leaves()),
    )  # fmt: skip
    inside = predict(chain, stack.memory.memory).seconds
    cached = sum(chain.mode(i, mode).cached for i, mode in enumerate(stack.memory.memory))  # gone by the backward pass
    return replace(
        chain,
        head_left=max(0, around.head_left + cached),
        head_backward=max(0, around.head_backward + cached),
        seconds_outside=max(0.0, whole - inside),
    )


def _given(block: BlockCost) -> BlockCost:
    """The costs of a first block whose input is part of the batch: it costs nothing to keep it."""
    modes = {
        name: replace(
            mode,
            held=mode.held - mode.kept_input,
            kept_input=0,
            forward_peak=mode.forward_peak - block.streams,
            backward_peak=mode.backward_peak - mode.kept_input,
        )
        for name, mode in block.modes.items()
    }
    return BlockCost(0, block.gradients, modes)


def measured(model: nn.Module, batch: Any, *, loss: Any = None) -> Prediction:
    """The peak and the time of one real step of a model as it stands, in the terms of `predict`."""
    args, kwargs = arguments(batch)
    with untouched(model), _without_grads(model):
        _step(model, args, kwargs, loss or mean_square)
        _clear(model)
        seconds = _timed(model, batch, loss or mean_square)
        with MemoryTracker(ignore=[model, *tensors_in((args, kwargs))]) as memory:
            _step(model, args, kwargs, loss or mean_square)
    return Prediction(memory.peak, seconds)


def mean_square(output: Any) -> Tensor:
    """A loss for any output: the mean square of its floating-point tensors, summed."""
    return torch.stack([t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]).sum()


def _step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> None:
    with torch.enable_grad():
        loss(model(*args, **kwargs)).backward()


def _timed(model: nn.Module, batch: Any, loss: Any) -> float:
    """The seconds of a step, from cleared gradients to cleared gradients."""
    args, kwargs = arguments(batch)
    _clear(model)
    start = time.perf_counter()
    _step(model, args, kwargs, loss)
    wait(list(model.parameters()))
    seconds = time.perf_counter() - start
    _clear(model)
    return seconds


def _the_stack(model: nn.Module) -> ReversibleSequence:
    stacks = [m for m in model.modules() if isinstance(m, ReversibleSequence)]
    if len(stacks) != 1:
        raise ValueError(
            f"The model has {len(stacks)} ReversibleSequences, where a plan is for one: "
            f"{'put one into it' if not stacks else 'name it with stack=...'}."
        )
    return stacks[0]


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
    args, kwargs = arguments(batch)
    seen: dict[str, Any] = {}
    tracker = MemoryTracker(ignore=[model, *tensors_in((args, kwargs))])
    with tracker as memory, _observed(stack, memory, seen), memory.phase("outside") as outside:
        seen["phase"] = outside
        with torch.enable_grad():
            end = loss(model(*args, **kwargs))
        seen["head_peak"], outside.peak = outside.peak, memory.live
        end.backward()
    if "streams" not in seen:
        raise ValueError("The model did not call its ReversibleSequence on this batch, so there is nothing to plan.")
    if seen["calls"] > 1:
        raise ValueError(
            f"The model called its ReversibleSequence {seen['calls']} times in one step, and what it needs is measured "
            "for one call. Plan each call as a stack of its own, or choose its memory by hand."
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


@contextmanager
def _without_grads(model: nn.Module) -> Iterator[None]:
    """As a training step begins after zero_grad(); `untouched` puts the gradients back."""
    _clear(model)
    yield


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
