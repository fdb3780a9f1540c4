"""What a conversion did to a model, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """A converted model compared with the original one, on one batch.

    Attributes:
        recipe: the recipe with its values.
        layers: how many layers were converted.
        branches: what became a branch: "layers", or "attention and feed-forward".
        logits_difference: the largest absolute difference between the converted and the original outputs in eval.
        loss_before: the original loss in eval.
        loss_after: the converted loss in eval.
        gradient_error: the relative error of the gradients in training, compared with those of the same converted
            network with all activations stored.
        drift: the largest relative error of a recomputed stream.
        side_bits: how many extra bits are saved per element per layer, on average.
        side_bytes: the bytes of all these bits.
        stream_bytes: the bytes of one stream; "checkpoint" saves all streams once per layer.
        peaks: the peak of live bytes in a training step, without parameters, gradients and batch: "original" for the
            original model, and "store", "checkpoint" and "reverse" for the converted one.
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
    peaks: dict[str, int]

    def __str__(self) -> str:
        # here, so that `import retrograde` loads no measuring tool
        from retrograde.measure.formatting import format_bytes

        peaks = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.peaks.items())
        return (
            f"{self.recipe} on {self.layers} layers, branches: {self.branches}\n"
            f"  outputs in eval differ by {self.logits_difference:.3g}; "
            f"loss {self.loss_before:.4f} before, {self.loss_after:.4f} after\n"
            f"  relative error: gradients {self.gradient_error:.3g}, recomputed streams {self.drift:.3g}\n"
            f"  extra bits per element per layer: {self.side_bits:g}, {format_bytes(self.side_bytes)} in total "
            f"(one stream: {format_bytes(self.stream_bytes)})\n"
            f"  peak memory: {peaks}"
        )
