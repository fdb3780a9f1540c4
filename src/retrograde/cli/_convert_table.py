"""The reports of `retrograde convert` as a table, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrograde.conversion import Report
from retrograde.measure.formatting import format_bytes

BEST = "peak, converted: reverse"
STOCK, STORED = "against stock", "against stored"
ROWS: dict[str, Callable[[Report], str]] = {
    "branches": lambda r: r.branches,
    "training computes": lambda r: _function(r.in_training),
    "eval computes": lambda r: _function(r.in_eval),
    f"{STOCK}, eval: outputs differ by": lambda r: _exact_or(r.logits_difference),
    f"{STOCK}, eval: loss before": lambda r: f"{r.loss_before:.4f}",
    f"{STOCK}, eval: loss after": lambda r: f"{r.loss_after:.4f}",
    f"{STOCK}, training: loss before": lambda r: f"{r.training_loss_before:.4f}",
    f"{STOCK}, training: loss after": lambda r: f"{r.training_loss_after:.4f}",
    f"{STOCK}, training: gradients differ by": lambda r: _exact_or(r.gradient_difference),
    f"{STORED}: error of gradients": lambda r: _exact_or(r.gradient_error),
    f"{STORED}: error of recomputed streams": lambda r: _exact_or(r.drift),
    "extra bits per element per layer": lambda r: f"{r.side_bits:.3g}",
    "extra bits in total": lambda r: format_bytes(r.side_bytes),
    "peak, original": lambda r: format_bytes(r.peaks["original"]),
    "peak, converted: store": lambda r: format_bytes(r.peaks["store"]),
    "peak, converted: checkpoint": lambda r: format_bytes(r.peaks["checkpoint"]),
    BEST: lambda r: format_bytes(r.peaks["reverse"]) if "reverse" in r.peaks else "no inverse",
}


def _function(sentence: str) -> str:
    """A recipe's sentence about its function, short enough for a column."""
    short = sentence.partition(";")[0]
    return short.replace("the same function as in training, another than the original one", "the same as training")


def _exact_or(error: float) -> str:
    return "0, to the bit" if error == 0 else f"{error:.2g}"


def table(reports: Mapping[str, Report], place: str) -> Any:
    """One column per recipe."""
    from rich.table import Table

    layers = next(iter(reports.values())).layers
    columns = Table(title=f"{layers} layers in {place}", title_justify="left", box=None)
    columns.add_column("")
    for name in reports:
        columns.add_column(name, justify="right", no_wrap=True)
    for label, show in ROWS.items():
        columns.add_row(label, *(show(report) for report in reports.values()), style="bold" if label == BEST else "")
    return columns


def advice(reports: Mapping[str, Report], layers: str | None) -> list[str]:
    """What the figures mean for training the model, of which `layers` were converted."""
    lines = [
        "",
        "Peaks count the tensors that a training step allocates, without parameters, their gradients and the batch.",
        f'"{STOCK}" compares with the original model, "{STORED}" with stored activations of the converted one, from '
        "the same random numbers; errors are relative.",
    ]
    for name, report in reports.items():
        lines += _advice(name, report)
    written = {name: f'"{name}"' if ":" not in name else f"recipes.{r.recipe}" for name, r in reports.items()}
    where = f', layers="{layers}"' if layers else ""
    calls = " or ".join(f"rg.convert(model, {recipe}{where})" for recipe in written.values())
    lines.append(f"The weights and their names do not change. In the training script: {calls}")
    return lines


def _advice(name: str, report: Report) -> list[str]:
    """What the figures of one recipe mean."""
    lines, peaks = [], report.peaks
    least = peaks.get("reverse", peaks["checkpoint"])
    if least >= peaks["original"]:
        lines.append(f"{name}: recomputing saves nothing here: what is kept takes more than so few layers.")
    elif least >= peaks["checkpoint"] and "reverse" in peaks:
        lines.append(f"{name}: memory='checkpoint' needs no more than 'reverse' here, with so few layers.")
    if report.logits_difference:
        lines.append(f"{name} computes another function than the model was trained for: fine-tune it.")
    elif report.gradient_difference:
        lines.append(f"{name} trains another function than the model's, which it computes in eval.")
    return lines
