"""Pictures in example-output/, where matplotlib is installed; the examples also print the main results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUTPUT = Path("example-output")


def blank(width: float, height: float) -> Figure | None:
    """An empty figure of so many inches, or None (and a message) without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("\nNo picture, because matplotlib is not installed: pip install matplotlib")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, name: str) -> None:
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / name
    figure.savefig(path, dpi=150)
    print(f"\nPicture: {path}")
