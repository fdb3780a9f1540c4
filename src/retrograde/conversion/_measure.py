"""How the figures of a `Report` are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._before import Before
from retrograde._guard import relative_error
from retrograde._plan import Memory
from retrograde._randomness import everyday, read, write
from retrograde._streams import Streams
from retrograde._torch_private import tree_flatten

from ._report import Report
from ._stack import ConvertedStack

Loss = Callable[[Any], Tensor]
MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")


def measure(
    model: nn.Module, stack: ConvertedStack, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None
) -> Report:
    """Run the model as it was and as it is, on one batch."""
    bench = _Bench(model, stack, args, kwargs, loss or default_loss)
    with _left_as_found(model):
        model.eval()
        with torch.no_grad():
            with stack.routed("stock"):
                before = bench.output()
            after = bench.output()
        difference = max(
            (float((a.double() - b.double()).abs().max()) for a, b in zip(_main(before), _main(after), strict=True)),
            default=0.0,
        )
        losses = [float(bench.loss(output)) for output in (before, after)]
        model.train()
        true, _ = bench.gradients("store")
        found, seen = bench.gradients("reverse")
        peaks = bench.peaks()
    side = seen.side_bytes
    return Report(
        recipe=repr(stack.recipe),
        layers=len(stack.stocks),
        branches=stack.parts,
        logits_difference=difference,
        loss_before=losses[0],
        loss_after=losses[1],
        gradient_error=relative_error(found, true),
        drift=seen.drift,
        side_bits=8 * side / max(seen.elements, 1) / len(stack.stocks),
        side_bytes=side,
        stream_bytes=seen.stream_bytes,
        peaks=peaks,
    )


def default_loss(output: Any) -> Tensor:
    """The model's own loss, or the mean square of its first output."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    return _main(output)[0].float().square().mean()


class _Seen:
    """What was seen of the streams in one step."""

    def __init__(self) -> None:
        self.drift, self.side_bytes, self.elements, self.stream_bytes = 0.0, 0, 0, 0


class _Seeing:
    """Holds the true streams before a block, to compare the rebuilt ones with."""

    def __init__(self, seen: _Seen, streams: Streams) -> None:
        self._seen = seen
        self._streams = tuple(s.detach().clone() for s in streams)

    def rebuilt(self, streams: Streams) -> Streams:
        errors = [relative_error(s, true) for s, true in zip(streams, self._streams, strict=True)]
        self._seen.drift = max(self._seen.drift, *errors)
        return streams


class _Bench:
    def __init__(
        self, model: nn.Module, stack: ConvertedStack, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss
    ) -> None:
        self.model, self.stack, self.args, self.kwargs, self.loss = model, stack, args, kwargs, loss
        self.state = [(g, read(g)) for g in everyday([p.device for p in model.parameters()])]

    def output(self) -> Any:
        for generator, state in self.state:
            write(generator, state)
        return self.model(*self.args, **self.kwargs)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss(self.output()).backward()

    def gradients(self, memory: Memory) -> tuple[Tensor, _Seen]:
        """All gradients in one row, and what was seen of the streams."""
        seen = _Seen()

        def probe(block: int, streams: Streams) -> _Seeing:
            for wire in self.stack._blocks()[block].wires(self.stack.names):
                if wire.step.forgets:
                    seen.side_bytes += wire.step.coupling.side(streams[wire.target]).numel()
            seen.elements = streams[0].numel()
            seen.stream_bytes = streams[0].numel() * streams[0].element_size()
            return _Seeing(seen, streams)

        before, self.stack.memory = self.stack.memory, memory
        self.stack.probe = probe
        try:
            self.step()
        finally:
            self.stack.memory, self.stack.probe = before, None
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(gradients) if gradients else torch.zeros(0), seen

    def peaks(self) -> dict[str, int]:
        """The peak of live bytes in one step, as the model was and with each memory mode."""
        found: dict[str, int] = {}
        with self.stack.routed("stock"):
            found["stock"] = self._peak()
        before = self.stack.memory
        try:
            for mode in MODES:
                self.stack.memory = mode
                found[mode] = self._peak()
        finally:
            self.stack.memory = before
        return found

    def _peak(self) -> int:
        from retrograde.diagnose import MemoryTracker  # here, so that `import retrograde` loads no tool

        self.step()  # what a first run keeps for later ones is not of interest
        batch = [t for t in tree_flatten((self.args, self.kwargs))[0] if isinstance(t, Tensor)]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        with MemoryTracker(ignore=[self.model, *gradients, *batch]) as tracker:
            self.loss(self.output()).backward()  # into the gradients that are there
        return int(tracker.peak)


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Leave gradients, buffers, generators and training flags as they were."""
    flags = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    before = Before([model], [p.device for p in model.parameters()])
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()


def _main(output: Any) -> list[Tensor]:
    """The output to compare: logits where there are any, else the first tensor."""
    if isinstance(output, Tensor):
        return [output]
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return [logits]
    values = output.values() if isinstance(output, Mapping) else output
    return [next(t for t in tree_flatten(list(values))[0] if isinstance(t, Tensor))]
