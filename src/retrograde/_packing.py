"""The hooks that take what autograd saves, and hand it a number in its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from ._torch_private import never_compiled

Pack = Callable[[Tensor], int]


@never_compiled
def packer(tensors: list[Tensor], versions: list[int]) -> Pack:
    """A hook that keeps what autograd saves in `tensors`, and hands autograd a number, counted on from those it finds.

    It runs for every saved tensor: it looks up nothing, and numbers do not concern the garbage collector.
    """
    keep, note, number = tensors.append, versions.append, itertools.count(len(tensors)).__next__

    def pack(tensor: Tensor) -> int:
        keep(tensor)
        note(tensor._version)
        return number()

    return pack


@never_compiled
def detaching_packer(tensors: list[Tensor], versions: list[int]) -> Pack:
    """The same, for tensors without their graph."""
    keep, note, number = tensors.append, versions.append, itertools.count(len(tensors)).__next__

    def pack(tensor: Tensor) -> int:
        keep(tensor if tensor.is_leaf else tensor.detach())
        note(tensor._version)
        return number()

    return pack
