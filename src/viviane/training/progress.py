"""One progress line in a terminal: samples/s, loss, metric, remaining time. Silent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

_REFRESH_S = 0.5


class ProgressLine:
    """A rich progress bar on stderr, refreshed at most twice per second.

    Args:
        total_steps: number of steps of the complete run.
        done_steps: number of steps done before a resume.
        shown: True or False; None shows it if stderr is a terminal, and in a notebook.
    """

    def __init__(self, total_steps: int, done_steps: int = 0, shown: bool | None = None) -> None:
        self.shown = (sys.stderr.isatty() or in_notebook()) if shown is None else shown
        self._bar: Any = None
        self._metric = ""
        self._rows = 0
        self._last = perf_counter()
        if self.shown:
            self._bar = self._make(total_steps, done_steps)

    def _make(self, total_steps: int, done_steps: int) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[rate]:,.0f} samples/s"),
            TextColumn("loss {task.fields[loss]:.4f}{task.fields[metric]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=in_notebook() or None, force_jupyter=False),
            auto_refresh=False,
        )
        self._task = bar.add_task(
            "",
            total=total_steps if total_steps < sys.maxsize else None,
            completed=done_steps,
            rate=0.0,
            loss=float("nan"),
            metric="",
        )
        bar.start()
        return bar

    def step(self, step: int, num_rows: int, read_loss: Callable[[], float]) -> None:
        """Count a step; the loss is read from the device only when the line is redrawn."""
        if self._bar is None:
            return
        self._rows += num_rows
        now = perf_counter()
        if now - self._last < _REFRESH_S:
            return
        rate = self._rows / (now - self._last)
        self._rows, self._last = 0, now
        self._bar.update(self._task, completed=step, rate=rate, loss=read_loss(), metric=self._metric, refresh=True)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Show these validation metrics from now on."""
        name = next((name for name in metrics if name != "loss"), "loss")
        self._metric = f" valid {name} {metrics[name]:.4f}"  # only one: the line must fit in 80 columns
        self._last, self._rows = perf_counter(), 0  # exclude the time of the evaluation from the rate

    def close(self) -> None:
        """Keep the last line and restore the terminal."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None


def in_notebook() -> bool:
    """Return whether the process is a notebook kernel, whose output supports a line that is redrawn.

    Example:
        >>> in_notebook()
        False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"
