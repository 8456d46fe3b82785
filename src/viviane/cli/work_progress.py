"""Progress of commands that take minutes: bars at a terminal, lines elsewhere."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final, Self

import typer

from viviane.cli.console import is_quiet

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_S: Final = 10.0
"""Seconds between lines of a step in a file or a pipe."""


class WorkProgress:
    """On stderr: a bar for each step at a terminal; in a file or a pipe a line for each step every ten seconds.

    Args:
        begins: in a file or a pipe, print a line when a step begins, too, and not after ten seconds only.
    """

    def __init__(self, *, begins: bool = True) -> None:
        self._quiet, self._begins = is_quiet(), begins
        self._seen: dict[str, float] = {}

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=self._quiet or not self._terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, step: str, done: int, total: int) -> None:
        """Show how much of a step is done; a total of 0 is unknown."""
        if not self._terminal:
            self._line(step, done, total)
            return
        if step not in self._tasks:
            self._tasks[step] = self._bar.add_task(step, total=total or None)
        self._bar.update(self._tasks[step], completed=done, total=total or None)

    def _line(self, step: str, done: int, total: int) -> None:
        now = perf_counter()
        last = self._seen.setdefault(step, float("-inf") if self._begins else now)
        if self._quiet or now - last < LINE_S:
            return
        self._seen[step] = now
        typer.echo(f"{step}: {done:,} of {total:,}" if total else f"{step}: {done:,}", err=True)
