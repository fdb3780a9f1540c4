"""The reports of `retrograde convert` as a table, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrograde.conversion import Report
from retrograde.planning import show_size

ROWS: dict[str, Callable[[Report], str]] = {
    "branches": lambda r: r.branches,
    "outputs in eval differ by": lambda r: _exact_or(r.logits_difference),
    "loss in eval, as it was": lambda r: f"{r.loss_before:.4f}",
    "loss in eval, converted": lambda r: f"{r.loss_after:.4f}",
    "gradients off by": lambda r: _exact_or(r.gradient_error),
    "rebuilt streams off by": lambda r: _exact_or(r.drift),
    "side bits an element and layer": lambda r: f"{r.side_bits:.3g}",
    "side bits in all": lambda r: show_size(r.side_bytes),
    "peak, as it was": lambda r: show_size(r.peaks["stock"]),
    "peak, converted: store": lambda r: show_size(r.peaks["store"]),
    "peak, converted: checkpoint": lambda r: show_size(r.peaks["checkpoint"]),
    "peak, converted: reverse": lambda r: show_size(r.peaks["reverse"]),
}


def _exact_or(error: float) -> str:
    return "0, to the bit" if error == 0 else f"{error:.2g}"


def table(reports: Mapping[str, Report], place: str) -> Any:
    """A column for each recipe."""
    from rich.table import Table

    layers = next(iter(reports.values())).layers
    found = Table(title=f"{layers} layers in {place}", title_justify="left", box=None)
    found.add_column("")
    for name in reports:
        found.add_column(name, justify="right", no_wrap=True)
    for label, show in ROWS.items():
        best = label == "peak, converted: reverse"
        found.add_row(label, *(show(report) for report in reports.values()), style="bold" if best else "")
    return found


def advice(reports: Mapping[str, Report], layers: str | None) -> list[str]:
    """What the figures mean for the one who will train the model, of which `layers` were converted."""
    lines = ["", "Peaks are of the tensors that a step makes, without parameters, their gradients and the batch."]
    for name, report in reports.items():
        peaks = report.peaks
        if peaks["reverse"] >= peaks["stock"]:
            lines.append(f"{name}: reversing saves nothing here; with so few layers two streams outweigh them.")
        elif peaks["reverse"] >= peaks["checkpoint"]:
            lines.append(f"{name}: memory='checkpoint' takes no more than reversing here, where layers are few.")
        if report.logits_difference:
            lines.append(f"{name} computes another function than the model was trained for: fine-tune it.")
    written = {name: f'"{name}"' if ":" not in name else f"recipes.{r.recipe}" for name, r in reports.items()}
    where = f', layers="{layers}"' if layers else ""
    calls = " or ".join(f"rg.convert(model, {recipe}{where})" for recipe in written.values())
    lines.append(f"The weights and their names stay as they are. In the training script: {calls}")
    return lines
