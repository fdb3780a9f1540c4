"""What a conversion did to a model, in figures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """A converted model beside what it was, on one batch.

    Attributes:
        recipe: the recipe with its values.
        layers: how many layers were converted.
        branches: what became a branch: "layers", or "attention and feed-forward".
        logits_difference: the largest difference of an output in eval from what it was.
        loss_before: the loss in eval as it was.
        loss_after: the loss in eval, converted.
        gradient_error: how far the gradients in training are from those of the same network with all activations
            stored, relatively.
        drift: the largest relative error of a rebuilt stream.
        side_bits: how many bits an element and layer are kept aside, on average.
        side_bytes: the bytes of all side bits.
        stream_bytes: the bytes of one stream: what "checkpoint" keeps a layer, times the streams.
        peaks: the peak of live bytes in a step, less parameters, gradients and batch: "stock" as the model was, and
            converted for "store", "checkpoint" and "reverse".
    """

    recipe: str
    layers: int
    branches: str
    logits_difference: float
    loss_before: float
    loss_after: float
    gradient_error: float
    drift: float
    side_bits: float
    side_bytes: int
    stream_bytes: int
    peaks: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        mib = {name: f"{name} {size / 2**20:.2f}" for name, size in self.peaks.items()}
        return "\n".join(
            (
                f"{self.recipe} on {self.layers} layers, branches: {self.branches}",
                f"  outputs in eval differ by {self.logits_difference:.3g}; "
                f"loss {self.loss_before:.4f} before, {self.loss_after:.4f} after",
                f"  gradients off by {self.gradient_error:.3g}, rebuilt streams by {self.drift:.3g}",
                f"  side bits {self.side_bits:g} an element and layer: {self.side_bytes / 2**20:.3f} MiB "
                f"(one stream: {self.stream_bytes / 2**20:.3f} MiB)",
                f"  peak MiB: {', '.join(mib.values())}",
            )
        )
