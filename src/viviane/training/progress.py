"""Progress of a run: a line that is redrawn at a terminal and in a notebook, else a line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from viviane.core.logging import get_logger

_REFRESH_S: Final = 0.5
_LINE_S: Final = 10.0  # between lines of a log file

_log = get_logger("training.progress")


class ProgressLine:
    """Progress on stderr: a bar of rich, redrawn twice per second at most, or a plain line every ten seconds.

    The bar needs a terminal or a notebook. In a file or a pipe the plain lines are printed if `shown` is True; if it is
    None they go to the logger, at level INFO.

    Args:
        total_steps: number of steps of the complete run.
        done_steps: number of steps done before a resume.
        shown: True or False; None shows the bar where it is possible.
    """

    def __init__(self, total_steps: int, done_steps: int = 0, shown: bool | None = None) -> None:
        redrawn = sys.stderr.isatty() or in_notebook()
        self.shown = redrawn if shown is None else shown
        self._bar: Any = None
        self._metric = ""
        self._rows = 0
        self._last = self._start = perf_counter()
        self._total, self._first = total_steps, done_steps
        self._lines: Callable[[str], None] | None = None
        self.read_more: Callable[[], str] = str
        """Returns what a line of a log says besides."""
        if self.shown and redrawn:
            self._bar = self._make(total_steps, done_steps)
        elif self.shown:
            self._lines = _print_line
        elif shown is None:
            self._lines = _log.info

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
        if self._bar is None and self._lines is None:
            return
        self._rows += num_rows
        now = perf_counter()
        if now - self._last < (_LINE_S if self._bar is None else _REFRESH_S):
            return
        rate = self._rows / (now - self._last)
        self._rows, self._last = 0, now
        if self._lines is not None:
            self._lines(self._line(step, rate, read_loss(), now))
            return
        self._bar.update(self._task, completed=step, rate=rate, loss=read_loss(),
                         metric=self._metric + self.read_more(), refresh=True)  # fmt: skip

    def _line(self, step: int, rate: float, loss: float, now: float) -> str:
        """Return a line for a log file."""
        of, left = "", ""
        if self._total < sys.maxsize:
            of = f" of {self._total:,}"
            seconds = (now - self._start) / max(step - self._first, 1) * max(self._total - step, 0)
            left = f", {_clock(seconds)} left"
        more = self.read_more()
        return f"step {step:,}{of}, {rate:,.0f} samples/s, loss {loss:.4f}{self._metric}{more}{left}"

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


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _clock(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> _clock(59), _clock(3700)
        ('0:00:59', '1:01:40')
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def in_notebook() -> bool:
    """Return whether the process is a notebook kernel, whose output supports a line that is redrawn.

    Example:
        >>> in_notebook()
        False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"
