"""Run the notebooks of docs/ in this process and keep what they print and draw: python docs/run_notebook.py

Without a kernel: cells are plain Python, in one namespace.
"""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).resolve().parent


def run(notebook: Any, name: str) -> None:
    """Run the code cells in order, and put what each showed into its outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(
        cell for cell in notebook.cells if cell.cell_type == "code"
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(
                compile(cell.source, f"{name}, code cell {number + 1}", "exec"),
                namespace,
            )
        cell.execution_count = number + 1
        cell.outputs = (
            [nbformat.v4.new_output("stream", text=printed.getvalue())]
            if printed.getvalue()
            else []
        )
        cell.outputs += [
            nbformat.v4.new_output("display_data", data={"image/png": png})
            for png in _drawn()
        ]


def _drawn() -> list[str]:
    """The figures that are open, as PNG in base64; they are closed."""
    import matplotlib.pyplot as plt

    pictures = []
    for number in plt.get_fignums():
        data = io.BytesIO()
        plt.figure(number).savefig(data, format="png", dpi=100)
        pictures.append(base64.b64encode(data.getvalue()).decode())
    plt.close("all")
    return pictures


def main() -> None:
    import matplotlib as mpl

    mpl.use("agg")
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        run(notebook, path.name)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
