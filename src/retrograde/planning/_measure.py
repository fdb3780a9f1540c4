"""The costs of a model's stack: its blocks, and what surrounds it in a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from retrograde.engine.observer import Observer, StackCall
from retrograde.engine.outputs import Outputs
from retrograde.engine.preserve import preserve
from retrograde.measure.batches import detached_leaf
from retrograde.measure.free_memory import has_room
from retrograde.measure.loss import Loss
from retrograde.measure.memory_tracker import MemoryTracker, Phase, storage_bytes
from retrograde.measure.stacks import parameters_of, the_stack
from retrograde.measure.timing import Progress, least_seconds, silent
from retrograde.measure.training_step import clear_gradients, loss_of, step_peak, step_seconds, step_tracker
from retrograde.memory import STORE, Memory, Mode, Plan
from retrograde.sequence import ReversibleSequence

from ._block_run import Surroundings
from ._blocks import measure_blocks
from ._costs import BlockCost, ChainCost, Prediction, predict

_WORTH_A_CHANGE = 0.01  # of the work of storing everything


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    stack: str | ReversibleSequence | None = None,
    progress: Progress = silent,
) -> ChainCost:
    """What every block of a model's stack costs in each memory mode, and what surrounds the stack.

    The arguments are those of `plan`.
    """
    stack = the_stack(model, stack)
    with preserve(model):
        watch = _watched_step(model, batch, stack, loss)
        blocks, last, outputs = measure_blocks(stack, watch.streams, watch.surroundings, progress)
        chain = _chain(stack, watch, blocks, last, storage_bytes(outputs))
        fitting = {mode: plan for mode, plan in chain.uniform().items() if has_room(model, predict(chain, plan).peak)}
        ways = {mode: partial(following, stack, Plan(plan, chain.anchors)) for mode, plan in fitting.items()}
        return chain.with_steps(least_seconds(ways, partial(step_seconds, model, batch, loss), progress))


def measured(model: nn.Module, batch: Any, *, loss: Loss | None = None) -> Prediction:
    """The peak and the time of a real training step of a model as it is now, in the terms of `predict`."""
    with preserve(model):
        step_seconds(model, batch, loss)
        return Prediction(seconds=step_seconds(model, batch, loss), peak=step_peak(model, batch, loss))


@contextmanager
def following(stack: ReversibleSequence, memory: Memory) -> Iterator[None]:
    """A context in which a stack follows another plan."""
    before = stack.memory
    stack.memory = memory
    try:
        yield
    finally:
        stack.memory = before


def _chain(
    stack: ReversibleSequence, watch: _StackWatch, blocks: list[BlockCost], last: dict[Mode, Any], outputs: int
) -> ChainCost:
    """All costs together, but for the times of whole steps."""
    if not watch.made and not stack.exact:  # streams that are put on a grid are the stack's own
        if len(blocks) == 1:
            last = _of_the_batch(replace(blocks[0], modes=last)).modes
        blocks[0] = _of_the_batch(blocks[0])
    context = sum(t.numel() * t.element_size() for t in watch.surroundings.leaves())
    anchors = watch.plan.anchors
    chain = ChainCost(tuple(blocks), outputs, watch.before - watch.made, anchors=anchors, last=last, context=context)
    stored = sum(chain.effort(i, STORE.name) for i in range(len(blocks)))
    cached = sum(chain.mode(i, mode).cached for i, mode in enumerate(watch.plan.memory))  # gone by the backward pass
    return replace(
        chain,
        head_peak=max(0, watch.head_peak - watch.after),
        head_left=max(0, watch.entered - watch.after + cached),
        head_backward=max(0, watch.head_backward - watch.after + cached),
        change=_WORTH_A_CHANGE * stored,
    )


def _of_the_batch(block: BlockCost) -> BlockCost:
    """The costs of a first block whose input is part of the batch: saving it costs nothing."""
    modes = {
        name: replace(
            mode,
            saved=max(0, mode.saved - mode.saved_input),  # an input that passes through counts as an output
            saved_input=0,
            forward_peak=mode.forward_peak - block.streams,
            backward_peak=mode.backward_peak - mode.saved_input,
        )
        for name, mode in block.modes.items()
    }
    return replace(block, streams=0, modes=modes)


def _watched_step(model: nn.Module, batch: Any, stack: ReversibleSequence, loss: Loss | None) -> _StackWatch:
    """Run one step for its bytes."""
    clear_gradients(parameters_of(model))
    with step_tracker(model, batch) as memory, memory.phase("outside") as outside:
        watch = _StackWatch(stack, memory, outside)
        with stack.observed_by(watch):
            end = loss_of(model, batch, loss)
            watch.head_peak, outside.peak = outside.peak, memory.live
            end.backward()
    if not watch.calls:
        raise ValueError("The model did not call its ReversibleSequence on this batch, so there is nothing to plan.")
    if watch.calls > 1:
        raise ValueError(
            f"The model called its ReversibleSequence {watch.calls} times in one step, and its costs are measured for "
            "one call. Plan each call as a stack of its own, or choose its memory by hand."
        )
    if watch.entered < 0:
        raise ValueError(
            "The backward pass does not reach the ReversibleSequence, so there is nothing to plan: the loss does not "
            "depend on its outputs, or nothing in it or before it requires grad."
        )
    return watch


class _StackWatch(Observer):
    """Notes the live bytes when a stack is called, when it returns, and when the backward pass enters it.

    `before` are those at the call, of which `made` are the streams' own (not those of the batch); `after` those at the
    return. `head_peak` and `head_backward` are the peaks of what follows the stack, forward and backward, and `entered`
    the bytes when the backward pass enters the stack.
    """

    plan: Plan
    surroundings: Surroundings
    calls = before = made = after = head_peak = head_backward = 0
    entered = -1

    def __init__(self, stack: ReversibleSequence, memory: MemoryTracker, outside: Phase) -> None:
        self._stack, self._memory, self._outside = stack, memory, outside

    def on_call(self, call: StackCall) -> None:
        if call.plan != self._stack.memory:
            raise ValueError(
                "The model gives its ReversibleSequence a memory of its own in the call (memory=...), so that a plan "
                "assigned to the stack would not be followed. Remove it from the call while you plan."
            )
        self.calls += 1
        self.plan = call.plan
        self.streams = tuple(map(detached_leaf, call.streams))
        self.surroundings = Surroundings.of_call(self._stack.names, call.streams, call.context)
        self.before, self.made = self._memory.live, self._memory.counts(*call.streams)

    def on_return(self, outputs: Outputs) -> Outputs:
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._enter)
        self.after = self._outside.peak = self._memory.live
        return outputs

    def _enter(self, gradient: Tensor) -> None:
        if self.entered < 0:
            self.entered = self._memory.live - gradient.untyped_storage().nbytes()
            self.head_backward = self._outside.peak
