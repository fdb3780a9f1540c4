"""Memory per block: how the backward pass gets each block's activations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Integral
from typing import Any, Literal, get_args

from ._block import Block

Memory = Literal["reverse", "partial", "checkpoint", "offload", "store"]
"""How a block's activations come to the backward pass.

- "reverse": rebuilt from what comes after the block, by inverting it.
- "partial": the same, with the results of attention kept, or what each step `keeps`.
- "checkpoint": the block is run again from its input, which is kept.
- "offload": the same, and the input waits in the host's memory.
- "store": kept.
"""
INVERTING: tuple[Memory, ...] = ("reverse", "partial")


@dataclass(frozen=True)
class Plan:
    """The memory mode of each block. `anchors` are blocks before which the streams are kept.

    A block that is to "reverse" is rebuilt from what comes after it; "partial" is the same with the results of
    attention kept; "checkpoint" runs it again from its input, which is kept; "offload" has that input wait in the
    host's memory; "store" keeps all.

    An anchor costs the bytes of the streams; a rebuild never walks past one, so that drift
    starts anew there. Plans are plain data: print, compare and edit them, and keep them as JSON.

    Examples:
        >>> import retrograde as rg
        >>> plan = rg.Plan(["store"] * 2 + ["reverse"] * 10, anchors={6})
        >>> print(plan)
        blocks 0-1 store, 2-11 reverse; anchors before 6
        >>> rg.Plan.from_dict(plan.to_dict()) == plan
        True
    """

    memory: tuple[Memory, ...]
    anchors: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if isinstance(self.memory, str):
            raise ValueError(
                f"A plan has a list with a mode for each block, not memory={self.memory!r}: write "
                f"Plan.uniform({self.memory!r}, blocks)."
            )
        object.__setattr__(self, "memory", tuple(self.memory))
        anchors: list[Any] = list(self.anchors)
        if odd := [a for a in anchors if not isinstance(a, Integral)]:
            raise ValueError(f"Anchors are the numbers of blocks, not {odd}.")
        object.__setattr__(self, "anchors", frozenset(map(int, anchors)))
        for mode in self.memory:
            check_memory(mode)
        outside = [a for a in sorted(self.anchors) if not 0 <= a < len(self.memory)]
        if outside:
            raise ValueError(f"Anchors {outside} name no block: the plan has {len(self.memory)} blocks, from 0.")

    @classmethod
    def uniform(cls, memory: Memory, blocks: int, *, anchor_every: int = 0) -> Plan:
        """The same mode for every block, with an anchor before every so many of them."""
        return cls((memory,) * blocks, frozenset(range(anchor_every, blocks, anchor_every) if anchor_every else ()))

    def to_dict(self) -> dict[str, Any]:
        """The plan as lists and strings, for JSON or a checkpoint."""
        return {"memory": list(self.memory), "anchors": sorted(self.anchors)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        if not isinstance(data, Mapping):
            raise ValueError(f"A plan has 'memory' and 'anchors' by name, but a {type(data).__name__} was given.")
        if unknown := set(data) - {"memory", "anchors"}:
            raise ValueError(f"A plan has 'memory' and 'anchors', but {sorted(unknown)} were given.")
        if "memory" not in data:
            raise ValueError("A plan has 'memory', a list with a mode for each block, but none was given.")
        return cls(data["memory"], data.get("anchors", ()))

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        parts, start = [], 0
        for mode, group in groupby(self.memory):
            end = start + len(list(group))
            parts.append(f"{start if end == start + 1 else f'{start}-{end - 1}'} {mode}")
            start = end
        anchors = f"; anchors before {', '.join(map(str, sorted(self.anchors)))}" if self.anchors else ""
        return f"blocks {', '.join(parts)}{anchors}"


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
        if mode in INVERTING and not block.invertible:
            names = [step.name for step in block.each_step() if not step.invertible]
            raise ValueError(
                f"Block {i} has memory={mode!r}, but {', '.join(names)} cannot be inverted. Give this block "
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
        anchored = bool(plan.anchors) and any(before < a <= i for a in plan.anchors)
        cut = anchored or mode in ("checkpoint", "offload") or mode != plan.memory[before]
        tapes += bool(position) and cut
        keys.append(tapes)
    for _, group in groupby(zip(keys, running, strict=True), key=lambda pair: pair[0]):
        blocks = tuple(i for _, i in group)
        yield Segment(plan.memory[blocks[0]], blocks)
