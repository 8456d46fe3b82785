"""Runs side by side: best metrics, speed, size, the settings that differ, and their curves in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from viviane.core.errors import DataError
from viviane.core.files import write_bytes_atomic
from viviane.core.json_files import read_json_object
from viviane.report import html
from viviane.report.chart import Line, line_chart
from viviane.report.panels import Panel, section
from viviane.report.record import RunRecord
from viviane.report.sections import TITLES, duration, short_bytes
from viviane.training import History
from viviane.training.history import has_direction, higher_is_better

_MOST_RUNS = 32


@dataclass(frozen=True)
class RunFacts:
    """What is compared about one run.

    Args:
        name: of the run folder.
        metrics: the best validation value of each metric; of those without a direction, the last one.
        best_steps: the step of each of these values.
        steps, seconds, samples_per_second, model_bytes: of the training; None where nothing was recorded.
        settings: settings of the run by dotted path.
    """

    name: str
    metrics: dict[str, float]
    best_steps: dict[str, int]
    steps: int | None
    seconds: float | None
    samples_per_second: float | None
    model_bytes: int | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Several runs.

    Args:
        runs: in the order that was given.
        differing: dotted paths of the settings that are not the same in all runs.
        records: what the runs left.
    """

    runs: tuple[RunFacts, ...]
    differing: tuple[str, ...]
    records: tuple[RunRecord, ...]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics of any run, in the order of their first appearance."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.metrics))

    def best_of(self, metric: str) -> str | None:
        """Return the name of the run whose value is best; None where no direction is better, or two are equal."""
        values = [(run.metrics[metric], run.name) for run in self.runs if metric in run.metrics]
        if len(values) < 2 or not has_direction(metric):
            return None
        up = higher_is_better(metric)
        values.sort(key=lambda one: one[0], reverse=up)
        return None if values[0][0] == values[1][0] else values[0][1]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the comparison: the name of a fact, then its value in each run."""
        rows: list[tuple[str, ...]] = []
        for metric in self.metric_names:
            best = self.best_of(metric)
            cells = [_metric(run, metric, run.name == best) for run in self.runs]
            rows.append((TITLES.get(metric, metric.replace("_", " ")), *cells))
        rows.append(("steps", *("" if run.steps is None else f"{run.steps:,}" for run in self.runs)))
        rows.append(("time", *("" if run.seconds is None else duration(run.seconds) for run in self.runs)))
        speeds = [run.samples_per_second for run in self.runs]
        rows.append(("samples per second", *("" if one is None else f"{one:,.0f}" for one in speeds)))
        sizes = [run.model_bytes for run in self.runs]
        rows.append(("saved model", *("" if one is None else short_bytes(one) for one in sizes)))
        for path in self.differing:
            rows.append((path, *(_setting(run.settings, path) for run in self.runs)))
        return [row for row in rows if any(row[1:])]


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    """Read run folders and compare them.

    Raises:
        DataError: fewer than two folders, one named twice, or one that holds no run.
    """
    if not 2 <= len(folders) <= _MOST_RUNS:
        raise DataError("not a number of runs to compare", value=len(folders), allowed=f"2 to {_MOST_RUNS}")
    records = tuple(RunRecord.load(folder) for folder in folders)
    names = _names([record.folder.resolve() for record in records])
    runs = tuple(_facts(name, record) for name, record in zip(names, records, strict=True))
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    differing = tuple(
        path for path in paths if any(_setting(run.settings, path) != _setting(runs[0].settings, path) for run in runs)
    )
    return Comparison(runs, differing, records)


def write_comparison(folders: Sequence[str | Path], file: str | Path) -> Path:
    """Write a self-contained page that compares runs; returns the file. Errors as for `compare_runs`."""
    found = compare_runs(folders)
    names = [run.name for run in found.runs]
    table = Panel("Side by side", str(html.part("table", ("", *names), found.rows())), "* best of the runs", wide=True)
    body = section("Figures and settings", [table]) + section("Curves", _curves(found))
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    page = html.page(" and ".join(names) if len(names) < 4 else f"{len(names)} runs",
                     f"Viviane runs side by side, written {written}", body)  # fmt: skip
    target = Path(file)
    write_bytes_atomic(target, page.encode())
    return target


def _curves(found: Comparison) -> list[Panel]:
    panels = []
    wanted = [("train", "loss", "training loss"), *(("valid", one, f"validation {TITLES.get(one, one)}")
                                                    for one in found.metric_names)]  # fmt: skip
    wanted.append(("train", "samples_per_second", "samples per second"))
    for split, key, title in wanted:
        pairs = zip(found.runs, found.records, strict=True)
        lines = [Line(run.name, record.curve(split, key), marks=True) for run, record in pairs]
        if any(len(line.points) for line in lines):
            panels.append(Panel(title[:1].upper() + title[1:], _drawing(lines, title)))
    return panels


def _drawing(lines: list[Line], title: str) -> Any:
    return lambda width: line_chart(lines, x_label="step", y_label=title, width=width)


def _facts(name: str, record: RunRecord) -> RunFacts:
    history = History(record.rows)
    metrics: dict[str, float] = {}
    steps: dict[str, int] = {}
    for metric in record.metric_names:
        rows = [row for row in record.rows if row.get("split") == "valid" and isinstance(row.get(metric), int | float)]
        if rows:
            row = history.best_row(metric) if has_direction(metric) else rows[-1]
            metrics[metric], steps[metric] = float(row[metric]), int(row["step"])
    train = [row for row in record.rows if row.get("split") == "train"]
    speeds = sorted(float(row["samples_per_second"]) for row in train if row.get("samples_per_second"))
    fits = record.machine.get("fits", [])
    return RunFacts(
        name, metrics, steps,
        steps=int(train[-1]["step"]) if train else None,
        seconds=sum(float(fit["seconds"]) for fit in fits) if fits else None,
        samples_per_second=speeds[len(speeds) // 2] if speeds else None,
        model_bytes=record.model_bytes or None,
        settings=_flat(_settings(record)),
    )  # fmt: skip


def _settings(record: RunRecord) -> dict[str, Any]:
    """Return what the user wrote, where the command line made the run, else the settings of the fit."""
    file = record.folder / "train.json"
    found = read_json_object(file, error=DataError) if file.exists() else dict(record.config)
    return {name: value for name, value in found.items() if name not in ("name", "run_folder", "format", "version")}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def _setting(settings: dict[str, Any], path: str) -> str:
    value = settings.get(path)
    return "" if value is None else str(value)


def _metric(run: RunFacts, metric: str, best: bool) -> str:
    if metric not in run.metrics:
        return ""
    return f"{run.metrics[metric]:.5f}, step {run.best_steps[metric]:,}" + (" *" if best else "")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that tell them apart.

    Raises:
        DataError: one folder is named twice.
    """
    if len(set(folders)) < len(folders):
        raise DataError("a run is named twice", value=", ".join(map(str, folders)))
    for parts in range(1, max(len(one.parts) for one in folders) + 1):
        names = ["/".join(one.parts[-parts:]) for one in folders]
        if len(set(names)) == len(names):
            return names
    return [str(one) for one in folders]
