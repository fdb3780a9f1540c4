"""How the figures of a `Report` are measured. It is imported on use: `import retrograde` loads no measuring tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine.drift import relative_error, worst_error
from retrograde.engine.observer import Observer
from retrograde.engine.preserve import StateSnapshot, preserve
from retrograde.engine.rng import torch_generators
from retrograde.measure.batches import call, tensors_in
from retrograde.measure.loss import Loss, default_loss
from retrograde.measure.training_step import loss_of, step_tracker
from retrograde.network.streams import Streams

from ._report import Report
from ._stack import ConvertedStack

MODES = ("store", "checkpoint", "reverse")


def measure(model: nn.Module, stack: ConvertedStack, batch: Any, loss: Loss | None) -> Report:
    """Run the original and the converted model on one batch. The model is left as it was."""
    with preserve(model):  # the stack's memory and route too
        trial = _Trial(model, stack, batch, loss)
        model.eval()
        with torch.no_grad():
            with stack.routed("original"):
                before = trial.output()
            after = trial.output()
        losses = [float(trial.loss(output)) for output in (before, after)]
        model.train()
        true, _ = trial.gradients("store")
        recomputed, streams = trial.gradients("reverse")
        gradient_error = relative_error(recomputed, true)
        peaks = trial.peaks()  # adds to the gradients
    return Report(
        recipe=repr(stack.recipe),
        layers=len(stack),
        branches=stack.parts,
        logits_difference=float((_main(after).double() - _main(before).double()).abs().max()),
        loss_before=losses[0],
        loss_after=losses[1],
        gradient_error=gradient_error,
        drift=streams.drift,
        side_bits=8 * streams.side_bytes / max(streams.elements, 1) / len(stack),
        side_bytes=streams.side_bytes,
        stream_bytes=streams.stream_bytes,
        peaks=peaks,
    )


class _Trial:
    """Runs of a converted model on one batch, all from the same RNG state."""

    def __init__(self, model: nn.Module, stack: ConvertedStack, batch: Any, loss: Loss | None) -> None:
        self.model, self.stack, self.batch, self.loss = model, stack, batch, loss or default_loss
        self._rng = StateSnapshot([], torch_generators(dict.fromkeys(p.device for p in model.parameters())))

    def output(self) -> Any:
        self._rng.restore()
        return call(self.model, self.batch)

    def step(self) -> None:
        self._rng.restore()
        loss_of(self.model, self.batch, self.loss).backward()

    def gradients(self, memory: str) -> tuple[list[Tensor], _StreamStatistics]:
        """The gradients of one training step, and what was seen of the streams."""
        statistics = _StreamStatistics(self.stack)
        self.stack.memory = memory
        self.model.zero_grad()
        with self.stack.observed_by(statistics):
            self.step()
        return [p.grad for p in self.model.parameters() if p.grad is not None], statistics

    def peaks(self) -> dict[str, int]:
        """The peak of live bytes in one step of the original model, and of the converted one in each memory mode."""
        with self.stack.routed("original"):
            peaks = {"original": self._peak()}
        for mode in MODES:
            self.stack.memory = mode
            peaks[mode] = self._peak()
        return peaks

    def _peak(self) -> int:
        self.step()  # what a first run keeps for later ones does not count
        with step_tracker(self.model, self.batch) as tracker:
            self.step()  # adds to the gradients that exist already
        return tracker.peak


class _StreamStatistics(Observer):
    """How far recomputed streams drift in one step, and how many bytes their side bits take."""

    def __init__(self, stack: ConvertedStack) -> None:
        self._stack = stack
        self.drift, self.side_bytes, self.elements, self.stream_bytes = 0.0, 0, 0, 0

    def on_block(self, block: int, streams: Streams) -> _TrueStreams:
        for bound in self._stack[block].bound_steps(self._stack.names):
            if bound.step.has_side_bits:
                self.side_bytes += bound.step.coupling.side_bits(streams[bound.target]).numel()
        self.elements = streams[0].numel()
        self.stream_bytes = streams[0].numel() * streams[0].element_size()
        return _TrueStreams(self, streams)


class _TrueStreams:
    """The true streams before a block, with which the recomputed ones are compared."""

    def __init__(self, statistics: _StreamStatistics, streams: Streams) -> None:
        self._statistics = statistics
        self._streams = tuple(s.detach().clone() for s in streams)

    def recomputed(self, streams: Streams) -> Streams:
        self._statistics.drift = max(self._statistics.drift, worst_error(streams, self._streams))
        return streams


def _main(output: Any) -> Tensor:
    """The output to compare: the logits if there are any, otherwise the first tensor."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else tensors_in(output)[0]
