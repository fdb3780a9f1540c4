"""What a sequence is made of, checked when it is built: its blocks, their streams, and options for each block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._block import Block
from ._step import StreamName


def check_blocks(blocks: list[Any]) -> None:
    if not blocks:
        raise ValueError("A reversible sequence needs at least one block.")
    for i, block in enumerate(blocks):
        if not isinstance(block, Block):
            raise TypeError(
                f"Block {i} is a {type(block).__name__}, not a retrograde.Block. "
                "Make one of two branches with retrograde.two_stream(f, g)."
            )


def names_of(blocks: list[Block]) -> tuple[StreamName, ...]:
    kinds = {isinstance(name, str) for block in blocks for name in block.names}
    if len(kinds) > 1:
        raise ValueError("Some blocks name their streams and others number them; choose one for the whole sequence.")
    if kinds == {False}:
        return tuple(range(max(len(block.names) for block in blocks)))
    return tuple(dict.fromkeys(name for block in blocks for name in block.names))


def groups_of(blocks: list[Block], names: tuple[StreamName, ...]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        for name, members in block.groups.items():
            if groups.setdefault(name, members) != members:
                raise ValueError(f"Blocks disagree on the streams of {name!r}: {groups[name]} and {members}.")
    left = [n for n in names if not any(n in members for members in groups.values())]
    if groups and left:
        raise ValueError(f"The streams {left} belong to none of the groups {groups}; put each stream into one.")
    return groups


def probabilities(layer_drop: float | Sequence[float], count: int) -> list[float]:
    each = [float(layer_drop)] * count if isinstance(layer_drop, (int, float)) else [float(p) for p in layer_drop]
    if len(each) != count or not all(0 <= p <= 1 for p in each):
        raise ValueError(
            f"layer_drop={layer_drop!r}: give a probability from 0 to 1, or one for each of {count} blocks."
        )
    return each


def positions(blocks: Sequence[int], count: int) -> set[int]:
    outside = [i for i in blocks if not -count <= i < count]
    if outside:
        raise ValueError(f"hidden={list(blocks)}: the stack has {count} blocks, so {outside} name none.")
    return {i % count for i in blocks}
