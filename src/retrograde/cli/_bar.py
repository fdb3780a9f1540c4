"""Progress of training on the error stream: a live bar on a terminal, some plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from retrograde.measure.formatting import format_bytes

LINES = 8  # printed in a run that has no terminal


class Bar:
    """A progress bar with the loss, the speed, the peak memory and the remaining time.

    Args:
        label: the text before the bar.
        total: the number of steps, `start` of which are done already.
    """

    def __init__(self, label: str, total: int, *, start: int = 0) -> None:
        from rich.console import Console

        self.label, self.total, self.start = label, total, start
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.began = time.perf_counter()
        self._shown = start
        self._live = _live(self.console) if self.console.is_terminal else None
        self._task = self._live and self._live.add_task(label, total=total, completed=start, figures="")

    def __enter__(self) -> Bar:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, step: int, loss: float, rate: float, peak: int) -> None:
        """Show that a step is done; `rate` is in tokens per second, `peak` in bytes."""
        figures = f"loss {loss:.4f} · {rate:,.0f} tokens/s · peak {format_bytes(peak)}"
        if self._live:
            self._live.update(self._task, completed=step, figures=figures)
        elif step == self.total or step - self._shown >= max(1, (self.total - self.start) // LINES):
            self._shown = step
            left = (time.perf_counter() - self.began) / (step - self.start) * (self.total - step)
            self.console.print(f"  {self.label:<11} step {step}/{self.total} · {figures} · {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        (self._live.console if self._live else self.console).print(text, markup=False)


def _live(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24 if console.width >= 100 else 8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        *([TextColumn("left")] if console.width >= 100 else []),
        console=console,
        refresh_per_second=5,
    )
