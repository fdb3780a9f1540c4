"""What a stack returns before its streams are merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from retrograde.network.step import StreamName
from retrograde.network.streams import Streams

from .torch_internals import register_pytree_node

Losses = tuple[Tensor, ...]


class Outputs(tuple[Tensor, ...]):
    """The streams after a stack: a tuple, with names where the streams have names.

    Attributes:
        names: the streams' names, or their positions.
        aux: the sum of all auxiliary losses, or None if no block has one.
        aux_by_block: for each block that ran and has them, its auxiliary losses.
        hidden: the streams after each block that was asked for.
    """

    names: tuple[StreamName, ...]
    aux: Tensor | None
    aux_by_block: dict[int, Losses]
    hidden: dict[int, Streams]

    def __new__(cls, streams: Iterable[Tensor], names: tuple[StreamName, ...]) -> Outputs:
        outputs = super().__new__(cls, streams)
        outputs.names = names
        outputs.aux = None
        outputs.aux_by_block = {}
        outputs.hidden = {}
        return outputs

    def __getnewargs__(self) -> tuple[tuple[Tensor, ...], tuple[StreamName, ...]]:
        return tuple(self), self.names

    def after(self, streams: Streams) -> Outputs:
        """The same outputs with other streams."""
        outputs = Outputs(streams, self.names)
        outputs.aux, outputs.aux_by_block, outputs.hidden = self.aux, self.aux_by_block, self.hidden
        return outputs

    def named(self) -> dict[StreamName, Tensor]:
        """The streams by name."""
        return dict(zip(self.names, self, strict=True))


def _flatten(outputs: Outputs) -> tuple[list[Any], tuple[StreamName, ...]]:
    return [tuple(outputs), outputs.aux, outputs.aux_by_block, outputs.hidden], outputs.names


def _unflatten(parts: Iterable[Any], names: tuple[StreamName, ...]) -> Outputs:
    streams, aux, aux_by_block, hidden = parts
    outputs = Outputs(streams, names)
    outputs.aux, outputs.aux_by_block, outputs.hidden = aux, aux_by_block, hidden
    return outputs


register_pytree_node(Outputs, _flatten, _unflatten)  # where DDP and FSDP look for the tensors that a model returns
