"""Checks of what users give: the blocks of a sequence, options per block, and the context of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .block import Block
from .step import StreamName
from .streams import Streams


def check_blocks(blocks: Sequence[Any]) -> None:
    if not blocks:
        raise ValueError("A reversible sequence needs at least one block.")
    for i, block in enumerate(blocks):
        if not isinstance(block, Block):
            raise TypeError(
                f"Block {i} is a {type(block).__name__}, not a retrograde.Block. "
                "Make one of two branches with retrograde.two_stream(f, g)."
            )


def names_of(blocks: Sequence[Block]) -> tuple[StreamName, ...]:
    """The names of the streams that all blocks share."""
    kinds = {isinstance(name, str) for block in blocks for name in block.names}
    if len(kinds) > 1:
        raise ValueError("Some blocks name their streams and others number them; choose one for the whole sequence.")
    if kinds == {False}:
        return tuple(range(max(len(block.names) for block in blocks)))
    return tuple(dict.fromkeys(name for block in blocks for name in block.names))


def groups_of(blocks: Sequence[Block], names: tuple[StreamName, ...]) -> dict[str, tuple[str, ...]]:
    """Which streams belong to which input, where blocks say so."""
    groups: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        for name, members in block.groups.items():
            if groups.setdefault(name, members) != members:
                raise ValueError(f"Blocks disagree on the streams of {name!r}: {groups[name]} and {members}.")
    left = [n for n in names if not any(n in members for members in groups.values())]
    if groups and left:
        raise ValueError(f"The streams {left} belong to none of the groups {groups}; put each stream into one.")
    return groups


def drop_probabilities(layer_drop: float | Sequence[float], count: int) -> list[float]:
    """One probability per block."""
    each = [float(layer_drop)] * count if isinstance(layer_drop, (int, float)) else [float(p) for p in layer_drop]
    if len(each) != count or not all(0 <= p <= 1 for p in each):
        raise ValueError(
            f"layer_drop={layer_drop!r}: give a probability from 0 to 1, or one for each of {count} blocks."
        )
    return each


def block_numbers(hidden: Sequence[int], count: int) -> set[int]:
    """The blocks after which hidden states are wanted, counted from 0."""
    outside = [i for i in hidden if not -count <= i < count]
    if outside:
        raise ValueError(f"hidden={list(hidden)}: the stack has {count} blocks, so {outside} name none.")
    return {i % count for i in hidden}


def merged_context(context: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """The context of a call: a dictionary, keywords, or both. Not a dictionary: what branches take as `context`."""
    if context is None:
        return named
    if not isinstance(context, Mapping):
        return {"context": context, **named}
    if twice := sorted(context.keys() & named.keys()):
        raise TypeError(f"{twice} is given in context={{...}} and as a keyword; give each name once.")
    return {**context, **named}


def check_context_names(blocks: Sequence[Block], given: frozenset[str]) -> None:
    """Raise if no branch takes a name that was given, or a branch lacks one."""
    steps = [(i, step) for i, block in enumerate(blocks) for step in block.each_step()]
    taken = frozenset().union(*(step.takes.names() for _, step in steps))
    if given - taken and not any(step.takes.everything for _, step in steps):
        listing = "; ".join(f"block {i} {step.name}: {step.takes}" for i, step in steps)
        raise TypeError(f"No branch takes the context {sorted(given - taken)}. What each takes: {listing}.")
    for i, step in steps:
        if missing := step.takes.required - given:
            raise TypeError(
                f"Block {i}: {step.name} needs the context {sorted(missing)}, but the call gave "
                f"{sorted(given) or 'none'}. Pass it by name, or give the branch's parameter a default."
            )


def check_masks(
    blocks: Sequence[Block], names: tuple[StreamName, ...], context: Mapping[str, Any], streams: Streams
) -> None:
    """Raise if a mask does not cover the leading dimensions of its stream: it would broadcast, or fail far inside."""
    for i, block in enumerate(blocks):
        for step in (step for step in block.each_step() if step.masks):
            context_names = dict(step.takes.pairs)
            for parameter, stream in step.masks.items():
                mask = context.get(context_names[parameter])
                shape = streams[names.index(stream)].shape
                if isinstance(mask, Tensor) and mask.shape != shape[: mask.ndim]:
                    raise ValueError(
                        f"Block {i}, {step.name}: {context_names[parameter]} has shape {tuple(mask.shape)}, but the "
                        f"stream {stream!r} of shape {tuple(shape)} needs {tuple(shape[: max(mask.ndim, 1)])}."
                    )


def check_exact(exact: object) -> None:
    if not isinstance(exact, bool):
        raise TypeError(f"exact={exact!r}: give True or False; the grid's bits are stack.grid_bits.")


def check_max_drift(max_drift: object) -> None:
    if max_drift is not None and not (isinstance(max_drift, (int, float)) and max_drift > 0):
        raise ValueError(f"max_drift={max_drift!r} is no tolerance: give a relative error above 0, such as 1e-3.")
