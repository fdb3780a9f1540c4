"""What a chain of blocks costs in time and bytes, for each memory mode, and what a plan of them adds up to.

NOTE [The memory of a plan]
 While block i goes backward, these bytes are alive:
 1. what the blocks before it saved for their own backward: a stored block its graph, a checkpointed one its input,
    a reversed one nothing, a selective one the results of its expensive operators;
 2. the streams at the end of each reversed part before it, and at each anchor inside one, unless the next
    block saves them as its input anyway;
 3. the gradients of the parameters of the blocks after it, those of shared parameters once, and of the context;
 4. what the block itself needs at its worst moment: measured, on this block alone.
 The end of the forward pass is one more such moment, with what comes after the stack (a head, a loss) for 4.
 Until then, under autocast, the casts of the weights are alive too: autocast caches them until its context ends.

NOTE [The time of a plan]
 Time is a sum over the blocks and what is outside of them, but not of the times of the blocks alone: a block by
 itself pays for the set-up of a call, which a chain pays for once, and reuses memory that it freed a moment ago,
 where a chain of stored blocks allocates new memory for each. So whole steps are timed with all blocks in one mode,
 for each mode, and the blocks' times in that mode are scaled to add up to it. The blocks' own times decide only
 how a step's time divides between blocks that differ. No mode is faster than storing: it does all that, and more.

NOTE [What a plan is chosen by]
 Not by these times, which differ from run to run, but by work: operators are counted, so that equal inputs give equal
 plans on any machine, however busy it is. Equal blocks have equal costs. And a mode that changes from one block to the
 next must be worth it: by `change`, a hundredth of the work of storing, per change. The times are for the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from retrograde.memory import STORE, Mode, mode_named


@dataclass(frozen=True)
class ModeCost:
    """One block in one memory mode, measured alone.

    Attributes:
        seconds: forward and backward.
        saved: bytes alive from its forward to its backward, its input among them where it is saved.
        saved_input: how much of `saved` are the input's streams.
        saved_output: how much of it are the output's streams, which a stored block may save. Of a reversed block:
            what is saved in addition where its part of the chain ends.
        forward_peak: the most bytes during its forward, its input included.
        backward_peak: the most bytes during its backward: what it saved, the streams' gradients and those of its
            parameters included.
        cached: the casts of weights that only autocast's cache keeps alive, until the end of the forward pass.
        work: what forward and backward do, counted (see `retrograde.measure.work_counter`); None where it is unknown.
    """

    seconds: float
    saved: int
    saved_input: int
    saved_output: int
    forward_peak: int
    backward_peak: int
    cached: int = 0
    work: float | None = None


@dataclass(frozen=True)
class BlockCost:
    """One block of a chain.

    Attributes:
        streams: bytes of the streams it is given.
        gradients: bytes of its parameters' gradients.
        modes: its costs in each mode that differs from the others here.
        same_as: modes that do for this block what another mode does: "selective" is "reverse" where nothing
            expensive runs.
    """

    streams: int
    gradients: int
    modes: dict[Mode, ModeCost]
    same_as: dict[Mode, Mode] = field(default_factory=dict)

    def measured_as(self, mode: Mode) -> Mode:
        """The mode whose costs are those of this one for the block: itself, its equal, or its fallback."""
        if mode in self.modes:
            return mode
        return self.same_as[mode] if mode in self.same_as else self.measured_as(mode_named(mode).fallback)


@dataclass(frozen=True)
class ChainCost:
    """All blocks of a stack, and what surrounds it.

    Attributes:
        outputs: bytes of the streams after the last block.
        before: bytes that what comes before the stack saves for its backward.
        head_peak: the most bytes that what comes after the stack needs in addition to the streams, going forward.
        head_left: how much of these is left when the backward pass enters the stack.
        head_backward: the most bytes that it needs in addition to the streams, going backward.
        seconds_outside: time spent outside of the stack.
        anchors: blocks before which the streams are saved in any case.
        last: the costs of the last block, which keeps the graph of its last step.
        context: bytes of the context's gradients, to which every block adds.
        change: what a change of the mode from one block to the next must save at least, in the unit of `work`.
    """

    blocks: tuple[BlockCost, ...]
    outputs: int
    before: int = 0
    head_peak: int = 0
    head_left: int = 0
    seconds_outside: float = 0.0
    anchors: frozenset[int] = frozenset()
    last: dict[Mode, ModeCost] = field(default_factory=dict)
    context: int = 0
    head_backward: int = 0
    change: float = 0.0

    @cached_property
    def _gradients_after(self) -> tuple[int, ...]:
        """For each block, the bytes of the gradients of the blocks after it."""
        return tuple(accumulate((b.gradients for b in reversed(self.blocks[1:])), initial=0))[::-1]

    def mode(self, block: int, memory: Mode) -> ModeCost:
        """The costs of a block in a mode; the last block of a chain has its own."""
        memory = self.blocks[block].measured_as(memory)
        if block == len(self.blocks) - 1 and memory in self.last:
            return self.last[memory]
        return self.blocks[block].modes[memory]

    def effort(self, block: int, memory: Mode, before: Mode | None = None) -> float:
        """What plans are chosen by: a block's work, or its time where that is unknown.

        See NOTE [What a plan is chosen by].

        Args:
            before: the mode of the block before it.
        """
        mode = self.mode(block, memory)
        own = mode.seconds if mode.work is None else mode.work
        return own + (self.change if before is not None and before != memory else 0.0)

    def carried(self, block: int, memory: Mode, following: Mode | None) -> int:
        """What a block leaves alive: for its own backward, and as the end of a reversed part (1 and 2 of the NOTE)."""
        mode, is_reversed = self.mode(block, memory), mode_named(memory).needs_inverse
        if following is None:
            return mode.saved
        is_anchored = mode_named(following).needs_inverse and block + 1 in self.anchors
        if is_reversed and following == memory and not is_anchored and mode_named(memory).blocks_per_tape is None:
            return mode.saved
        streams, next_input = self.blocks[block + 1].streams, self.mode(block + 1, following).saved_input
        if is_reversed:
            return mode.saved + max(0, (streams if is_anchored else mode.saved_output) - next_input)
        twice = mode.saved_output + next_input - streams  # what both save counts once
        return mode.saved - (twice if is_anchored else max(0, twice))

    def moments(self, block: int, memory: Mode, saved: int, cached: int = 0) -> Iterator[int]:
        """The bytes alive at a block's worst moments, with what the blocks before it saved and autocast cached."""
        mode = self.mode(block, memory)
        after = self._gradients_after[block] + (self.context if block + 1 < len(self.blocks) else 0)
        yield self.before + saved + cached + mode.forward_peak
        yield self.before + saved + self.head_left + after + mode.backward_peak

    def end_of_forward(self, saved: int, cached: int) -> int:
        """The bytes alive when all blocks have run, at the worst moment of what comes after them."""
        return self.before + saved + self.outputs + max(cached + self.head_peak, self.head_backward)

    def uniform(self) -> dict[Mode, tuple[Mode, ...]]:
        """For each mode the plan with all blocks in it; those that do not have it get what stands in for it."""
        modes = dict.fromkeys(mode for block in self.blocks for mode in block.modes)
        return {mode: tuple(block.measured_as(mode) for block in self.blocks) for mode in modes}

    def with_steps(self, seconds: Mapping[Mode, float]) -> ChainCost:
        """The same chain, with times that add up to those of whole steps in uniform plans, where these were taken."""
        alone = replace(self, seconds_outside=0.0)
        inside = {mode: predict(alone, plan).seconds for mode, plan in self.uniform().items() if mode in seconds}
        least = seconds.get(STORE.name, 0.0)
        taken = {mode: max(least, seconds[mode]) for mode in inside}
        outside = max(0.0, min((taken[mode] - inside[mode] for mode in inside), default=0.0))
        scaled = self.scaled({mode: (taken[mode] - outside) / inside[mode] for mode in inside}, outside)
        blocks = tuple(replace(block, modes=no_faster_than_storing(block.modes)) for block in scaled.blocks)
        return replace(scaled, blocks=blocks, last=no_faster_than_storing(scaled.last))

    def smallest_first(self) -> ChainCost:
        """The same chain, in which no mode takes any time: only bytes count."""

        def free(modes: dict[Mode, ModeCost]) -> dict[Mode, ModeCost]:
            return {mode: replace(cost, seconds=0.0, work=0.0) for mode, cost in modes.items()}

        blocks = tuple(replace(block, modes=free(block.modes)) for block in self.blocks)
        return replace(self, blocks=blocks, last=free(self.last), seconds_outside=0.0, change=0.0)

    def scaled(self, factors: Mapping[Mode, float], outside: float) -> ChainCost:
        """The same chain, with the blocks' times in each mode multiplied by a factor."""

        def scale(modes: dict[Mode, ModeCost]) -> dict[Mode, ModeCost]:
            return {mode: replace(cost, seconds=cost.seconds * factors.get(mode, 1.0)) for mode, cost in modes.items()}

        blocks = tuple(replace(block, modes=scale(block.modes)) for block in self.blocks)
        return replace(self, blocks=blocks, last=scale(self.last), seconds_outside=outside)


def no_faster_than_storing(modes: dict[Mode, ModeCost]) -> dict[Mode, ModeCost]:
    """The same costs, with at least the time and the work of storing: every other mode does all that, and more."""
    store = modes.get(STORE.name)
    if store is None:
        return modes
    return {
        name: replace(
            cost,
            seconds=max(cost.seconds, store.seconds),
            work=None if cost.work is None else max(cost.work, store.work or 0.0),
        )
        for name, cost in modes.items()
    }


class Prediction(NamedTuple):
    """What a plan is expected to need."""

    peak: int
    seconds: float


def predict(chain: ChainCost, memory: Sequence[Mode]) -> Prediction:
    """The peak and the time of a plan."""
    saved, cached, peak, seconds = 0, 0, 0, chain.seconds_outside
    for i, mode in enumerate(memory):
        peak = max(peak, *chain.moments(i, mode, saved, cached))
        saved += chain.carried(i, mode, memory[i + 1] if i + 1 < len(memory) else None)
        cached += chain.mode(i, mode).cached
        seconds += chain.mode(i, mode).seconds
    return Prediction(max(peak, chain.end_of_forward(saved, cached)), seconds)
