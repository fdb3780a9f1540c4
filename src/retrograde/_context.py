"""Checks of a call's context, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ._block import Block
from ._step import StreamName
from ._streams import Streams


def check_names(blocks: Sequence[Block], given: frozenset[str]) -> None:
    """Every name is taken by somebody, and nobody lacks one."""
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
    """Masks cover the leading dimensions of their streams; a wrong one would broadcast, or fail far inside."""
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
