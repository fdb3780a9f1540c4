"""How the figures of a `Report` are measured. It is imported on use: `import retrograde` loads no measuring tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from retrograde.memory import mode_named
from retrograde.network.streams import Streams

from ._report import Report
from ._stack import ConvertedStack

MODES = ("store", "checkpoint", "reverse")


def measure(model: nn.Module, stacks: Sequence[ConvertedStack], batch: Any, loss: Loss | None) -> Report:
    """Run the original and the converted model on one batch. The model is left as it was."""
    with preserve(model):  # the stacks' memory and route too
        trial = _Trial(model, stacks, batch, loss)
        model.eval()
        with torch.no_grad():
            with trial.original():
                before = trial.output()
            after = trial.output()
        losses = [float(trial.loss(output)) for output in (before, after)]
        model.train()
        with trial.original():
            stock_loss, stock, _ = trial.gradients("store")
        stored_loss, stored, _ = trial.gradients("store")
        _, recomputed, statistics = trial.gradients("reverse")
        gradient_error, stock_error = relative_error(recomputed, stored), relative_error(stored, stock)
        peaks = trial.peaks()  # adds to the gradients
    recipe, layers = stacks[0].recipe, sum(map(len, stacks))
    side_bytes = sum(s.side_bytes for s in statistics)
    saved_elements = sum(s.elements * len(stack) for s, stack in zip(statistics, stacks, strict=True))
    return Report(
        recipe=repr(recipe),
        layers=layers,
        branches=" / ".join(dict.fromkeys(stack.parts for stack in stacks)),
        in_training=recipe.in_training,
        in_eval=recipe.in_eval,
        logits_difference=float((_main(after).double() - _main(before).double()).abs().max()),
        loss_before=losses[0],
        loss_after=losses[1],
        training_loss_before=stock_loss,
        training_loss_after=stored_loss,
        gradient_difference=stock_error,
        gradient_error=gradient_error,
        drift=max(s.drift for s in statistics),
        side_bits=8 * side_bytes / max(saved_elements, 1),
        side_bytes=side_bytes,
        stream_bytes=max(s.stream_bytes for s in statistics),
        peaks=peaks,
    )


class _Trial:
    """Runs of a converted model on one batch, all from the same RNG state."""

    def __init__(self, model: nn.Module, stacks: Sequence[ConvertedStack], batch: Any, loss: Loss | None) -> None:
        self.model, self.stacks, self.batch, self.loss = model, stacks, batch, loss or default_loss
        self._rng = StateSnapshot([], torch_generators(dict.fromkeys(p.device for p in model.parameters())))
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @contextmanager
    def original(self) -> Iterator[None]:
        with ExitStack() as routes:
            for stack in self.stacks:
                routes.enter_context(stack.routed("original"))
            yield

    def output(self) -> Any:
        self._restore()
        return call(self.model, self.batch)

    def step(self) -> float:
        self._restore()
        loss = loss_of(self.model, self.batch, self.loss)
        loss.backward()
        return float(loss.detach())

    def _restore(self) -> None:
        """All runs start from the same RNG state and the same buffers, which a step may have updated."""
        self._rng.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    def gradients(self, memory: str) -> tuple[float, list[Tensor], list[_StreamStatistics]]:
        """The loss and the gradients of one training step, and what was seen of the streams."""
        statistics = [_StreamStatistics(stack) for stack in self.stacks]
        self._set_memory(memory)
        self.model.zero_grad()
        with ExitStack() as observers:
            for stack, each in zip(self.stacks, statistics, strict=True):
                if stack.recipe.has_inverse:
                    observers.enter_context(stack.observed_by(each))
            loss = self.step()
        return loss, [p.grad for p in self.model.parameters() if p.grad is not None], statistics

    def peaks(self) -> dict[str, int]:
        """The peak of live bytes in one step of the original model, and of the converted one in each memory mode."""
        with self.original():
            peaks = {"original": self._peak()}
        for mode in MODES:
            if self.stacks[0].recipe.has_inverse or not mode_named(mode).needs_inverse:
                self._set_memory(mode)
                peaks[mode] = self._peak()
        return peaks

    def _set_memory(self, memory: str) -> None:
        for stack in self.stacks:
            stack.memory = memory

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
