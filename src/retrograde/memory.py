"""Memory modes and plans: how the backward pass gets each block's activations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from numbers import Integral
from typing import Any

from .engine.checkpoint import CheckpointTape
from .engine.reverse import ReverseTape
from .engine.run import MakeTape, Segment
from .engine.saved_streams import OffloadedStreams
from .network.block import Block
from .network.choices import check_choice


@dataclass(frozen=True)
class MemoryMode:
    """A way to get the activations of blocks in the backward pass.

    A mode of your own is one of these with a tape of its own (see `retrograde.engine.tape.Tape`); give it as `memory`
    in the place of a name, or `register` it to use its name.

    Args:
        name: what to call it.
        description: what it does, in a sentence.
        make_tape: makes the tape for consecutive blocks from the call and their number of steps; None to store all.
        needs_inverse: whether blocks must be invertible; one that is not gets the mode `fallback`.
        blocks_per_tape: how many consecutive blocks share one tape; None for all of them.
        needs_accelerator: whether it does something only for streams on an accelerator.
        fallback: the mode of blocks that have no inverse.
    """

    name: str
    description: str
    make_tape: MakeTape | None
    needs_inverse: bool = False
    blocks_per_tape: int | None = None
    needs_accelerator: bool = False
    fallback: str = "checkpoint"

    def __str__(self) -> str:
        return self.name

    def for_block(self, block: Block) -> MemoryMode:
        """This mode, or its fallback where the block has no inverse."""
        return mode_named(self.fallback) if self.needs_inverse and not block.invertible else self


MODES: dict[str, MemoryMode] = {}
"""The registered modes by name."""


def register(mode: MemoryMode) -> MemoryMode:
    """Make a mode known by its name."""
    MODES[mode.name] = mode
    return mode


REVERSE = register(
    MemoryMode("reverse", "recompute each block's activations by inverting it from its output", ReverseTape, True)
)
SELECTIVE = register(
    MemoryMode(
        "selective",
        'like "reverse", with the results of expensive operators saved (attention, or each step\'s save_ops)',
        partial(ReverseTape, is_selective=True),
        True,
        fallback="selective checkpoint",
    )
)
CHECKPOINT = register(
    MemoryMode("checkpoint", "save each block's input, and run the block again", CheckpointTape, blocks_per_tape=1)
)
SELECTIVE_CHECKPOINT = register(
    MemoryMode(
        "selective checkpoint",
        'like "checkpoint", with the results of expensive operators saved: "selective" for blocks without an inverse',
        partial(CheckpointTape, is_selective=True),
        blocks_per_tape=1,
    )
)
OFFLOAD = register(
    MemoryMode(
        "offload",
        'like "checkpoint", with the saved inputs in the host\'s memory',
        partial(CheckpointTape, keep=OffloadedStreams),
        blocks_per_tape=1,
        needs_accelerator=True,
    )
)
STORE = register(MemoryMode("store", "store all activations, as autograd does", None))

Mode = str | MemoryMode
"""What users give as a mode: its name, or itself."""


def mode_named(mode: Mode) -> MemoryMode:
    """The mode of a name; raises if there is none."""
    if isinstance(mode, MemoryMode):
        return mode
    check_choice("memory", mode, MODES, otherwise="a list with one per block, or a Plan")
    return MODES[mode]


@dataclass(frozen=True)
class Plan:
    """The memory mode of each block. `anchors` are blocks before which the streams are saved.

    An anchor costs the bytes of the streams; recomputing never walks past one, so that drift
    starts anew there. Plans are plain data: print, compare and edit them, and keep them as JSON.

    Examples:
        >>> import retrograde as rg
        >>> plan = rg.Plan(["store"] * 2 + ["reverse"] * 10, anchors={6})
        >>> print(plan)
        blocks 0-1 store, 2-11 reverse; anchors before 6
        >>> rg.Plan.from_dict(plan.to_dict()) == plan
        True
    """

    memory: tuple[Mode, ...]
    anchors: frozenset[int] = frozenset()
    modes: tuple[MemoryMode, ...] = field(init=False, repr=False, compare=False)  # the same as objects
    whole: tuple[Segment, ...] = field(init=False, repr=False, compare=False)  # the segments where all blocks run

    def __post_init__(self) -> None:
        if isinstance(self.memory, (str, MemoryMode)):
            raise ValueError(
                f"A plan has a list with a mode per block, not memory={str(self.memory)!r}: write "
                f"Plan.uniform({str(self.memory)!r}, blocks)."
            )
        modes: list[Any] = list(self.memory)
        object.__setattr__(self, "memory", tuple(str(m) if MODES.get(str(m)) is m else m for m in modes))
        anchors: list[Any] = list(self.anchors)
        if odd := [a for a in anchors if not isinstance(a, Integral)]:
            raise ValueError(f"Anchors are the numbers of blocks, not {odd}.")
        object.__setattr__(self, "anchors", frozenset(map(int, anchors)))
        object.__setattr__(self, "modes", tuple(map(mode_named, self.memory)))
        outside = [a for a in sorted(self.anchors) if not 0 <= a < len(self.memory)]
        if outside:
            raise ValueError(f"Anchors {outside} name no block: the plan has {len(self.memory)} blocks, from 0.")
        object.__setattr__(self, "whole", tuple(self.segments(range(len(self.modes)))))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.memory, self.anchors)  # and modes by their names

    @classmethod
    def uniform(cls, memory: Mode, blocks: int | Sequence[Block], *, anchor_every: int = 0) -> Plan:
        """The same mode for every block, with an anchor before every so many of them.

        Args:
            blocks: the blocks, of which those without an inverse get the mode's fallback; or their number.
        """
        count = blocks if isinstance(blocks, int) else len(blocks)
        mode = mode_named(memory)
        modes = [mode] * count if isinstance(blocks, int) else [mode.for_block(block) for block in blocks]
        return cls(tuple(modes), frozenset(range(anchor_every, count, anchor_every) if anchor_every else ()))

    def segments(self, running: Sequence[int]) -> Iterator[Segment]:
        """Cut the running blocks where the mode changes, at anchors, and after as many as share a tape."""
        segment: list[int] = []
        is_anchored = any(a <= i for a in self.anchors for i in running[:1])
        modes = self.modes
        for i in running:
            starts_at_anchor = bool(segment) and any(segment[-1] < a <= i for a in self.anchors)
            is_full = bool(segment) and len(segment) == modes[segment[0]].blocks_per_tape
            if segment and (starts_at_anchor or is_full or modes[i] != modes[segment[-1]]):
                yield Segment(modes[segment[0]].make_tape, tuple(segment), is_anchored)
                segment, is_anchored = [], starts_at_anchor
            segment.append(i)
        if segment:
            yield Segment(modes[segment[0]].make_tape, tuple(segment), is_anchored)

    def to_dict(self) -> dict[str, Any]:
        """The plan as lists and strings, for JSON or a checkpoint."""
        unnamed = [mode.name for mode in self.memory if isinstance(mode, MemoryMode)]
        if unnamed:
            raise ValueError(f"The mode {unnamed[0]!r} of the plan is not registered: see retrograde.memory.register.")
        return {"memory": list(self.memory), "anchors": sorted(self.anchors)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        if not isinstance(data, Mapping):
            raise ValueError(f"A plan has 'memory' and 'anchors' by name, but a {type(data).__name__} was given.")
        if unknown := set(data) - {"memory", "anchors"}:
            raise ValueError(f"A plan has 'memory' and 'anchors', but {sorted(unknown)} were given.")
        if "memory" not in data:
            raise ValueError("A plan has 'memory', a list with a mode per block, but none was given.")
        return cls(data["memory"], data.get("anchors", ()))

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            return cls.from_dict(json.loads(text))
        except RecursionError:
            raise ValueError("The text is nested too deeply to be a plan.") from None

    def __str__(self) -> str:
        parts, start = [], 0
        for mode, group in groupby(self.memory):
            end = start + len(list(group))
            parts.append(f"{start if end == start + 1 else f'{start}-{end - 1}'} {mode}")
            start = end
        anchors = f"; anchors before {', '.join(map(str, sorted(self.anchors)))}" if self.anchors else ""
        return f"blocks {', '.join(parts)}{anchors}"


Memory = Mode | Sequence[Mode] | Plan
"""What users give as `memory`: one mode for all blocks, one per block, or a plan."""


def as_plan(memory: Memory, blocks: Sequence[Block]) -> Plan:
    """The plan that a user's `memory` means for these blocks; raises where it cannot work."""
    if isinstance(memory, (str, MemoryMode)):
        return Plan.uniform(memory, blocks)
    if not isinstance(memory, (Plan, Sequence)):
        raise TypeError(
            f"memory={type(memory).__name__} is no memory mode: give {', '.join(map(repr, MODES))}, a list with one "
            'per block, or a Plan. What a branch takes by the name "memory" goes into the context: '
            'stack(x, context={"memory": ...}).'
        )
    plan = memory if isinstance(memory, Plan) else Plan(tuple(memory))
    if len(plan.memory) != len(blocks):
        raise ValueError(
            f"The memory plan has {len(plan.memory)} entries for {len(blocks)} blocks; give one per block."
        )
    for i, (mode, block) in enumerate(zip(plan.modes, blocks, strict=True)):
        if mode.for_block(block) is not mode:
            names = [step.name for step in block.each_step() if not step.invertible]
            raise ValueError(
                f"Block {i} has memory={mode.name!r}, but {', '.join(names)} cannot be inverted. Give this block "
                f"{mode.fallback!r} or 'store', or give one mode for all blocks: memory={mode.name!r} falls back by "
                "itself."
            )
    return plan
