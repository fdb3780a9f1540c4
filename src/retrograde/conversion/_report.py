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
        in_training: whether training computes another function than the original network, in words.
        in_eval: the same of eval.
        logits_difference: the largest absolute difference between the converted and the original outputs in eval.
        loss_before: the original loss in eval.
        loss_after: the converted loss in eval.
        training_loss_before: the original loss in training, from the same RNG state.
        training_loss_after: the converted loss in training.
        gradient_difference: against stock: the relative difference of the converted network's gradients in training
            from those of the original one. Where the recipe draws random numbers, dropout masks differ too.
        gradient_error: against stored: the relative error of recomputed gradients in training, compared with those of
            the same converted network with all activations stored.
        drift: the largest relative error of a recomputed stream.
        side_bits: how many extra bits are saved per element per layer, on average.
        side_bytes: the bytes of all these bits.
        stream_bytes: the bytes of one stream; "checkpoint" saves all streams once per layer.
        peaks: the peak of live bytes in a training step, without parameters, gradients and batch: "original" for the
            original model; "store", "checkpoint" and, if the recipe has an inverse, "reverse" for the converted one.
    """

    recipe: str
    layers: int
    branches: str
    in_training: str
    in_eval: str
    logits_difference: float
    loss_before: float
    loss_after: float
    training_loss_before: float
    training_loss_after: float
    gradient_difference: float
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
            f"  training computes {self.in_training}; eval {self.in_eval}\n"
            f"  against stock, in eval: outputs differ by {self.logits_difference:.3g}; "
            f"loss {self.loss_before:.4f} before, {self.loss_after:.4f} after\n"
            f"  against stock, in training: gradients differ by {self.gradient_difference:.3g}; "
            f"loss {self.training_loss_before:.4f} before, {self.training_loss_after:.4f} after\n"
            f"  against stored activations of the converted network: gradients off by {self.gradient_error:.3g}, "
            f"recomputed streams by {self.drift:.3g}\n"
            f"  extra bits per element per layer: {self.side_bits:g}, {format_bytes(self.side_bytes)} in total "
            f"(one stream: {format_bytes(self.stream_bytes)})\n"
            f"  peak memory: {peaks}"
        )
