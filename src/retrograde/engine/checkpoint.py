"""Recomputing from streams that were saved before the steps. See NOTE [Rules of the tape]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograde.network.streams import Streams

from . import rng
from .call import Call
from .capture import Capture
from .saved_streams import KeepsStreams, SavedStreams
from .step_record import StepRecord
from .tape import Tape
from .torch_internals import load_compiler

_LAST = 4  # so many tensors one operator may save


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
            capture.is_numbered = i == last or i in self.differentiating  # the last may stop at a tensor
            if i == last and traits.may_stop and self.call.observer is None:
                capture.stop_at = len(record.versions)
            elif i == last:
                capture.tensors = _Saved(record)
            captures.append(capture)
            streams = self.redo(record, streams, capture)
            if isinstance(capture.tensors, _Saved):  # seen to repeat to its end
                traits.may_stop = capture.tensors.was_filled()
        return captures


class _Saved(list[Any]):
    """What the last step saves; and whether, when it saved the last tensor, all that it had saved was filled.

    An operator may fill a tensor with random numbers after it was saved (RReLU does): a replay that stopped there would
    leave it empty. Then random numbers are drawn after the last tensor was saved, or its numbers change. An accelerator
    is not asked for them: the host would have to wait.
    """

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._saves = len(record.versions)
        self._drawn = record.state.drawn
        self._had_drawn = False
        self._samples: list[tuple[Tensor, Tensor]] = []

    def append(self, tensor: Any) -> None:
        super().append(tensor)
        is_readable = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if is_readable and len(self) > self._saves - _LAST:
            self._samples.append((tensor, _sample(tensor)))
        if len(self) == self._saves:
            self._had_drawn = all(rng.read(generator) == after for generator, _, after in self._drawn)

    def was_filled(self) -> bool:
        """Asked after the replay. Lets go of the tensors, which autograd frees one by one."""
        samples, self._samples = self._samples, []
        return self._had_drawn and all(torch.equal(_sample(tensor), then) for tensor, then in samples)


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:64].clone()
