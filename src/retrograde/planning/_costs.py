"""What a chain of blocks costs in time and bytes, for each memory mode, and what a plan of them comes to.

NOTE [What a plan holds]
 While block i goes backward, alive are
 1. what the blocks before it hold until their turn: a stored block its graph, a checkpointed one its input,
    a reversed one nothing, or the results of attention if it is replayed in part;
 2. the streams at the end of each reversed part before it, and at each anchor inside one, unless the next
    block keeps them as its input anyway;
 3. the gradients of the parameters of the blocks after it, those of shared parameters once, and of the context;
 4. what the block itself needs at its worst moment: measured, on this block alone.
 The end of the forward pass is one more such moment, with what comes after the stack (a head, a loss) for 4.
 Until then, under autocast, the casts of the weights are alive too, which its cache holds until its context ends.

NOTE [What a plan takes]
 Time is a sum over the blocks and what is outside of them, but not of the times of the blocks alone: a block by
 itself pays for the set-up of a call, which a chain pays for once, and finds the memory that it let go a moment ago,
 where a chain of stored blocks takes fresh memory for each. So whole steps are timed with all blocks in one mode,
 for each mode, and the blocks' times in that mode are scaled to add up to it. What the blocks' own times decide is
 how a step's time divides between blocks that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from retrograde._plan import INVERTING, Memory

_STANDS_FOR: dict[Memory, Memory] = {"partial": "reverse", "offload": "checkpoint"}


@dataclass(frozen=True)
class ModeCost:
    """One block in one memory mode, measured alone.

    Attributes:
        seconds: forward and backward.
        held: bytes from its forward to its backward, its input among them where it is kept.
        kept_input: how much of `held` are the input's streams.
        kept_output: how much of it are the output's, which a stored block may hold. Of a reversed block: what
            is held besides where its part of the chain ends.
        forward_peak: the most bytes during its forward, its input included.
        backward_peak: the most bytes during its backward: what it held, the streams' gradients and those of its
            parameters included.
        cached: the casts of weights that autocast holds until the end of the forward pass, and nothing else does.
    """

    seconds: float
    held: int
    kept_input: int
    kept_output: int
    forward_peak: int
    backward_peak: int
    cached: int = 0


@dataclass(frozen=True)
class BlockCost:
    """One block of a chain: the bytes of the streams it is given, of its parameters' gradients, and its modes."""

    streams: int
    gradients: int
    modes: dict[Memory, ModeCost]


@dataclass(frozen=True)
class ChainCost:
    """All blocks of a stack, and what surrounds it.

    Attributes:
        outputs: bytes of the streams after the last block.
        before: bytes that what comes before the stack holds until the end.
        head_peak: the most bytes that what comes after the stack takes beyond the streams, going forward.
        head_left: what of these is left when the backward pass enters the stack.
        head_backward: the most bytes that it takes beyond the streams, going backward.
        seconds_outside: time spent outside of the stack.
        anchors: blocks before which the streams are kept in any case.
        keeps_last: the modes of the last block, which keeps the graph of its last step.
        context: bytes of the context's gradients, to which every block adds.
    """

    blocks: tuple[BlockCost, ...]
    outputs: int
    before: int = 0
    head_peak: int = 0
    head_left: int = 0
    seconds_outside: float = 0.0
    anchors: frozenset[int] = frozenset()
    keeps_last: dict[Memory, ModeCost] = field(default_factory=dict)
    context: int = 0
    head_backward: int = 0

    @cached_property
    def _gradients_after(self) -> tuple[int, ...]:
        """For each block, the bytes of the gradients of the blocks after it."""
        return tuple(accumulate((b.gradients for b in reversed(self.blocks[1:])), initial=0))[::-1]

    def mode(self, block: int, memory: Memory) -> ModeCost:
        """The costs of a block in a mode; the last block of a chain has its own.

        "partial" is "reverse" where there is no attention to keep, and "offload" is "checkpoint" on the host itself.
        """
        if memory not in self.blocks[block].modes:
            memory = _STANDS_FOR[memory]
        if block == len(self.blocks) - 1 and memory in self.keeps_last:
            return self.keeps_last[memory]
        return self.blocks[block].modes[memory]

    def carried(self, block: int, memory: Memory, following: Memory | None) -> int:
        """What a block leaves alive: for its own backward, and as the end of a reversed part (1 and 2 of the NOTE)."""
        mode = self.mode(block, memory)
        anchored = following in INVERTING and block + 1 in self.anchors
        if following is None or (following == memory and memory in INVERTING and not anchored):
            return mode.held
        streams, kept = self.blocks[block + 1].streams, self.mode(block + 1, following).kept_input
        if memory in INVERTING:
            return mode.held + max(0, (streams if anchored else mode.kept_output) - kept)
        twice = mode.kept_output + kept - streams  # what both hold counts once
        return mode.held - (twice if anchored else max(0, twice))

    def moments(self, block: int, memory: Memory, held: int, cached: int = 0) -> Iterator[int]:
        """The bytes alive at a block's worst moments, if the blocks before it hold `held`, and autocast `cached`."""
        mode = self.mode(block, memory)
        after = self._gradients_after[block] + (self.context if block + 1 < len(self.blocks) else 0)
        yield self.before + held + cached + mode.forward_peak
        yield self.before + held + self.head_left + after + mode.backward_peak

    def end_of_forward(self, held: int, cached: int) -> int:
        """The bytes alive when all blocks have run, at the worst moment of what comes after them."""
        return self.before + held + self.outputs + max(cached + self.head_peak, self.head_backward)

    def uniform(self) -> dict[Memory, tuple[Memory, ...]]:
        """For each mode the plan with all blocks in it; those that do not have it get what is nearest to it."""

        def nearest(mode: Memory, block: BlockCost) -> Memory:
            choices: tuple[Memory, ...] = (mode, _STANDS_FOR.get(mode, mode), "checkpoint")
            return next(each for each in choices if each in block.modes)

        modes = dict.fromkeys(mode for block in self.blocks for mode in block.modes)
        return {mode: tuple(nearest(mode, block) for block in self.blocks) for mode in modes}

    def with_steps(self, seconds: Mapping[Memory, float]) -> ChainCost:
        """The same chain, with times that add up to those of whole steps in uniform plans, as far as there are any."""
        alone = replace(self, seconds_outside=0.0)
        inside = {mode: predict(alone, plan).seconds for mode, plan in self.uniform().items() if mode in seconds}
        outside = max(0.0, min((seconds[mode] - inside[mode] for mode in inside), default=0.0))

        def scaled(modes: dict[Memory, ModeCost]) -> dict[Memory, ModeCost]:
            scale = {mode: (seconds[mode] - outside) / inside[mode] for mode in inside}
            return {mode: replace(cost, seconds=cost.seconds * scale.get(mode, 1.0)) for mode, cost in modes.items()}

        blocks = tuple(replace(block, modes=scaled(block.modes)) for block in self.blocks)
        return replace(self, blocks=blocks, keeps_last=scaled(self.keeps_last), seconds_outside=outside)


class Prediction(NamedTuple):
    """What a plan is expected to need."""

    peak: int
    seconds: float


def predict(chain: ChainCost, memory: Sequence[Memory]) -> Prediction:
    """The peak and the time of a plan."""
    held, cached, peak, seconds = 0, 0, 0, chain.seconds_outside
    for i, mode in enumerate(memory):
        peak = max(peak, *chain.moments(i, mode, held, cached))
        held += chain.carried(i, mode, memory[i + 1] if i + 1 < len(memory) else None)
        cached += chain.mode(i, mode).cached
        seconds += chain.mode(i, mode).seconds
    return Prediction(max(peak, chain.end_of_forward(held, cached)), seconds)
