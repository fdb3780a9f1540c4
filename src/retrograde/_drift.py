"""Anchors where drift asks for them: measured once, on a real call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ._before import Before
from ._block import Block
from ._drive import drive
from ._guard import relative_error
from ._plan import Plan
from ._step import StreamName
from ._streams import Streams
from ._torch_private import tree_map


class _Anchored:
    """Holds the true streams before a block; where the rebuilt ones are too far off, goes on with the true ones."""

    def __init__(self, block: int, streams: Streams, tolerance: float, anchors: set[int]) -> None:
        self._block = block
        self._streams = tuple(s.detach().clone() for s in streams)
        self._tolerance = tolerance
        self._anchors = anchors

    def rebuilt(self, streams: Streams) -> Streams:
        error = max(relative_error(s, true) for s, true in zip(streams, self._streams, strict=True))
        if error <= self._tolerance:
            return streams
        self._anchors.add(self._block)
        return self._streams


def place_anchors(
    blocks: Sequence[Block],
    names: tuple[StreamName, ...],
    plan: Plan,
    streams: Streams,
    context: Mapping[str, Any],
    *,
    tolerance: float,
) -> Plan:
    """The plan with the fewest anchors that keep every rebuilt stream within `tolerance` of the true one, relatively.

    One forward and backward pass is run, with the true streams of every block at hand: going back, an anchor is put
    where the rebuilt streams have come too far from them, and the way back goes on from the true ones. Putting each
    anchor as late as it can be leaves the fewest. Generators and buffers are left as they were.
    """
    anchors: set[int] = set()
    before = Before(blocks, [s.device for s in streams])
    try:
        with torch.enable_grad():
            leaves = tuple(s.detach().requires_grad_() for s in streams)
            outputs = drive(
                blocks,
                names,
                plan,
                range(len(blocks)),
                leaves,
                tree_map(_detached, dict(context)),
                find_probe=lambda block, streams: _Anchored(block, streams, tolerance, anchors),
            )
            total = torch.stack([stream.float().sum() for stream in outputs]).sum()
            torch.autograd.grad(total, leaves, allow_unused=True)
    finally:
        before.restore()
    return replace(plan, anchors=plan.anchors | anchors)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
