"""The trials of `viviane tune` as a page: the best value over time, each setting against the metric, a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viviane.cli.search_space import Range
from viviane.core.files import write_bytes_atomic
from viviane.report import html
from viviane.report.chart import Line, line_chart
from viviane.report.panels import Panel, section
from viviane.report.sections import TITLES


@dataclass(frozen=True)
class TrialRow:
    """A trial: its number from 0, its best value, its settings, seconds, and whether it was stopped early or failed."""

    number: int
    value: float | None
    settings: dict[str, Any]
    seconds: float
    pruned: bool


def trial_rows(study: Any, space: Sequence[Range]) -> list[TrialRow]:
    """Return the finished trials of a study; of settings those that are searched."""
    names = [one.path for one in space]
    rows = []
    for trial in study.trials:
        if trial.state.is_finished():
            chosen = {name: trial.params[name] for name in names if name in trial.params}
            seconds = trial.duration.total_seconds() if trial.duration is not None else 0.0
            rows.append(TrialRow(trial.number, trial.value, chosen, seconds, trial.state.name != "COMPLETE"))
    return rows


def write_page(file: Path, rows: Sequence[TrialRow], space: Sequence[Range], lead: str, up: bool) -> None:
    """Write the page.

    Args:
        file: to write.
        rows: the trials, in order.
        space: what was searched.
        lead: the metric.
        up: whether more of it is better.
    """
    ended = [row for row in rows if row.value is not None and not row.pruned]
    best: float | None = None
    curve: list[tuple[float, float]] = []
    for row in ended:
        value = float(row.value or 0.0)
        best = value if best is None else max(best, value) if up else min(best, value)
        curve.append((float(row.number + 1), best))
    every = [(float(row.number + 1), float(row.value or 0.0)) for row in ended]
    title = TITLES.get(lead, lead)
    panels = [
        Panel("Best so far", _drawing(Line("best so far", curve, marks=True), "trial", title)),
        Panel("Each trial", _drawing(Line("trial", every, marks=True, joined=False), "trial", title)),
    ]
    for one in space:
        points = sorted((float(row.settings[one.path]), float(row.value or 0.0)) for row in ended
                        if isinstance(row.settings.get(one.path), int | float))  # fmt: skip
        if points:
            dots = Line("trial", points, marks=True, joined=False)
            panels.append(Panel(one.path, _drawing(dots, one.path, title, log_x=one.is_log)))
    ordered = sorted(
        rows, key=lambda row: (row.value is None or row.pruned, -(row.value or 0.0) if up else row.value or 0.0)
    )
    names = [one.path for one in space]
    table = html.part("table", ("trial", title, *names, "seconds", ""), [
        [row.number + 1, _shown(row.value), *(_shown(row.settings.get(name)) for name in names), f"{row.seconds:.1f}",
         "stopped early or failed" if row.pruned else ""]
        for row in ordered
    ])  # fmt: skip
    body = section("Trials", [Panel("The best first", str(table), wide=True)]) + section("Curves", panels)
    line = f"{len(rows)} trials, {len(ended)} to their end"
    write_bytes_atomic(file, html.page("Tuning", line, body).encode())


def _drawing(line: Line, x_label: str, y_label: str, *, log_x: bool = False) -> Callable[[int], str]:
    return lambda width: line_chart([line], x_label=x_label, y_label=y_label, log_x=log_x, width=width)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
