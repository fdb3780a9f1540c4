"""Memory per block: how the backward pass gets each block's activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from ._block import Block

Memory = Literal["reverse", "checkpoint", "store"]


@dataclass(frozen=True)
class Plan:
    """The memory mode of each block. `anchors` are blocks before which the streams are kept.

    An anchor costs the bytes of the streams; a rebuild never walks past one, so that drift
    starts anew there.
    """

    memory: tuple[Memory, ...]
    anchors: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", tuple(self.memory))
        object.__setattr__(self, "anchors", frozenset(self.anchors))
        for mode in self.memory:
            check_memory(mode)
        outside = [a for a in sorted(self.anchors) if not 0 <= a < len(self.memory)]
        if outside:
            raise ValueError(f"Anchors {outside} name no block: the plan has {len(self.memory)} blocks, from 0.")


def check_memory(mode: object) -> None:
    if mode not in get_args(Memory):
        known = ", ".join(map(repr, get_args(Memory)))
        raise ValueError(
            f"memory={mode!r} is not known; choose one of {known}, a list with one for each block, or a Plan."
        )


def as_plan(memory: Memory | Sequence[Memory] | Plan, blocks: Sequence[Block]) -> Plan:
    """The plan that a user's `memory` means for these blocks; raises where it cannot work."""
    if isinstance(memory, Plan):
        plan = memory
    elif isinstance(memory, str):
        check_memory(memory)
        plan = Plan((memory,) * len(blocks))
    else:
        plan = Plan(tuple(memory))
    if len(plan.memory) != len(blocks):
        raise ValueError(f"The memory plan has {len(plan.memory)} entries for {len(blocks)} blocks; give one a block.")
    for i, (mode, block) in enumerate(zip(plan.memory, blocks, strict=True)):
        if mode == "reverse" and not block.invertible:
            names = [step.name for step in block.each_step() if not step.invertible]
            raise ValueError(
                f"Block {i} has memory='reverse', but {', '.join(names)} cannot be inverted. Give this block "
                "'checkpoint' or 'store', as in memory=['reverse', 'checkpoint', 'reverse']."
            )
    return plan


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks under one tape."""

    memory: Memory
    blocks: tuple[int, ...]


def segments(plan: Plan, running: Sequence[int]) -> Iterator[Segment]:
    """Cut the running blocks where the memory mode changes, at anchors, and around each checkpointed block."""
    tapes = 0
    keys = []
    for position, i in enumerate(running):
        mode = plan.memory[i]
        before = running[position - 1] if position else i
        cut = mode == "checkpoint" or mode != plan.memory[before] or any(before < a <= i for a in plan.anchors)
        tapes += bool(position) and cut
        keys.append(tapes)
    for _, group in groupby(zip(keys, running, strict=True), key=lambda pair: pair[0]):
        blocks = tuple(i for _, i in group)
        yield Segment(plan.memory[blocks[0]], blocks)
