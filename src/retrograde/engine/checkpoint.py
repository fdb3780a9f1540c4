"""Recomputing from streams that were saved before the steps. See NOTE [Rules of the tape]."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from retrograde.network.streams import Streams

from .call import Call
from .capture import Capture, StopReplay
from .saved_streams import KeepsStreams, SavedStreams
from .tape import Tape
from .torch_internals import is_of_parameter, load_compiler, never_compiled, number_of_next_node


class CheckpointTape(Tape):
    """Saves the streams before its steps, and runs them forward again. For one block: hooks may change what it returns.

    Args:
        keep: how it keeps the streams.
        is_selective: whether each branch saves some of its results for its replay.
    """

    spans_blocks = False

    def __init__(
        self,
        call: Call,
        steps: int,
        *,
        keep: Callable[[Streams], KeepsStreams] = SavedStreams,
        is_selective: bool = False,
    ) -> None:
        super().__init__(call, steps)
        self._keep = keep
        self.is_selective = is_selective
        if is_selective:
            load_compiler()

    def begin(self, streams: Streams) -> None:
        self._start = self._keep(tuple(s.detach() for s in streams))

    def recompute(self, index: int) -> list[Capture]:
        streams = self._start.tensors()
        captures: list[Capture] = []
        last = max(i for i, record in enumerate(self.records) if record.versions)
        for i, record in enumerate(self.records[: last + 1]):
            traits = record.cached.traits
            capture = Capture(i, self.first_handles[i], record)
            if i == last and traits.may_stop and self.call.observer is None:
                capture.pack = make_stopping_hook(capture)
            captures.append(capture)
            streams = self.redo(record, streams, capture)
            capture.pack = None  # which holds tensors
            if i == last:
                traits.may_stop = True  # a replay that ran to its end saved what the first run did
        return captures


@never_compiled
def make_stopping_hook(capture: Capture) -> Callable[[Tensor], int]:
    """A hook for the last step, which stops the replay as soon as autograd has saved all tensors.

    NOTE [Stopping early]
     Most operators save their inputs before they compute: a replay that stops there skips the last product of a
     branch. But an operator may fill a tensor after autograd has saved it (RReLU does with its noise). So the replay
     stops only if everything that the last operator has saved is filled: each tensor is a result of an operator that
     has ended (it has a `grad_fn`), a leaf that gets a gradient, a frozen parameter or a view of one. Otherwise the
     replay runs to its end. Operators before the last one have ended: each operator creates its node before it saves,
     and none creates a node while it computes, so tensors that were saved under the same number belong to one operator.
    """
    tensors, versions, saves = capture.tensors, capture.versions, len(capture.record.versions)
    doubtful: list[Tensor] = []  # saved by the operator that runs now, and perhaps not filled yet
    operator = -1

    def pack(tensor: Tensor) -> int:
        nonlocal operator
        number = number_of_next_node()
        if number != operator:
            operator = number
            doubtful.clear()
        if tensor.is_leaf and not tensor.requires_grad:
            doubtful.append(tensor)
        tensors.append(tensor if tensor.is_leaf else tensor.detach())
        versions.append(tensor._version)
        if len(tensors) == saves and all(map(is_of_parameter, doubtful)):
            raise StopReplay
        return len(tensors) - 1

    return pack
