"""Anchors where drift makes them necessary: measured once, on a real call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from retrograde.network.block import Block
from retrograde.network.streams import Streams

from .drift import worst_error
from .observer import Observer
from .outputs import Outputs
from .preserve import preserve
from .torch_internals import tree_map

Run = Callable[[Streams, Mapping[str, Any], Observer], Outputs]


class _AnchorFinder(Observer):
    """Puts an anchor where recomputed streams are too far from the true ones, and continues with the true ones."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.anchors: set[int] = set()

    def on_block(self, block: int, streams: Streams) -> _TrueStreams:
        return _TrueStreams(self, block, streams)


class _TrueStreams:
    def __init__(self, finder: _AnchorFinder, block: int, streams: Streams) -> None:
        self._finder = finder
        self._block = block
        self._streams = tuple(s.detach().clone() for s in streams)

    def recomputed(self, streams: Streams) -> Streams:
        if worst_error(streams, self._streams) <= self._finder.tolerance:
            return streams
        self._finder.anchors.add(self._block)
        return self._streams


def find_anchors(
    run: Run, blocks: Sequence[Block], streams: Streams, context: Mapping[str, Any], *, tolerance: float
) -> frozenset[int]:
    """The fewest anchors that keep every recomputed stream within `tolerance` of the true one, relatively.

    One forward and backward pass is run, with the true streams of every block at hand: on the way back, an anchor is
    put where the recomputed streams are too far from them, and recomputing continues from the true ones. Putting each
    anchor as late as possible leaves the fewest. Generators and buffers are left as they were.
    """
    finder = _AnchorFinder(tolerance)
    with preserve(*blocks, devices=[s.device for s in streams]), torch.enable_grad():
        leaves = tuple(s.detach().requires_grad_() for s in streams)
        outputs = run(leaves, tree_map(_detached, dict(context)), finder)
        total = torch.stack([stream.float().sum() for stream in outputs]).sum()
        torch.autograd.grad(total, leaves, allow_unused=True)
    return frozenset(finder.anchors)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
