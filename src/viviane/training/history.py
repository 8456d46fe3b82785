"""The metrics of a run in memory: the rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from viviane.core.errors import ConfigError, suggest
from viviane.core.html import html_table
from viviane.metrics import MetricName

CATALOGUE = "catalogue"
"""Prefix of the metrics that callbacks measure: "catalogue/ndcg@10"."""

_COUNTS = {"step", "epoch", "split", "lr", "samples_per_second", "seconds"}


def higher_is_better(metric: str) -> bool:
    """Return whether higher values of a metric are better; accepts "loss", "auc/<label>" and "gauc:<column>" too.

    Higher values of a callback's metrics, "catalogue/ndcg@10", are better.

    Raises:
        ConfigError: the metric is unknown, or, like calibration, has no better direction.

    Example:
        >>> higher_is_better("auc"), higher_is_better("loss")
        (True, False)
    """
    base = metric.split("/", maxsplit=1)[0]
    if base == CATALOGUE:
        return True
    direction = False if base == "loss" else MetricName.parse(base).kind.higher_is_better
    if direction is None:
        raise ConfigError(
            "neither higher nor lower values of this metric are better", value=metric, fix="choose another metric"
        )
    return direction


def is_better(metric: str, value: float, than: float | None) -> bool:
    """Return whether a value is better than another; NaN and infinities never are."""
    if not math.isfinite(value):
        return False
    if than is None:
        return True
    return value > than if higher_is_better(metric) else value < than


class History:
    """Rows of a run, each a dict with step, epoch, split ("train" or "valid"), loss, metrics, lr, seconds.

    Attributes:
        rows: the rows, oldest first.
        restored_step: the step whose weights `restore_best` restored, if it did.
        run_folder: the run folder, if there is one; an argument of `viviane.report.write_report`.
        stopped: why `fit` ended: "epochs", "max_steps", "target", "patience", "callback" or "interrupted".

    Example:
        >>> history = History([{"step": 1, "split": "valid", "auc": 0.7}, {"step": 2, "split": "valid", "auc": 0.6}])
        >>> history.best("auc")
        0.7
    """

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows: list[dict[str, Any]] = rows if rows is not None else []
        self.stopped = ""
        self.restored_step: int | None = None
        self.run_folder: str | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run early; it can be resumed."""
        return self.stopped == "interrupted"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def best_row(self, metric: str, split: str = "valid") -> dict[str, Any]:
        """Return the row with the best value of a metric; the first of equal ones.

        Raises:
            ConfigError: no row of that split has the metric.
        """
        rows = [row for row in self.rows if row.get("split") == split]
        best: dict[str, Any] | None = None
        for row in rows:
            value = row.get(metric)
            if value is not None and is_better(metric, value, None if best is None else best[metric]):
                best = row
        if best is None:
            known = {name for row in rows for name in row} - _COUNTS
            fix = suggest(metric, known) if known else "pass validation data to fit"
            raise ConfigError(f"no {split} row has this metric", value=metric, fix=fix)
        return best

    def best(self, metric: str, split: str = "valid") -> float:
        """Return the best value of a metric."""
        return float(self.best_row(metric, split)[metric])

    def __repr__(self) -> str:
        if not self.rows:
            return "History(no rows)"
        last = self.last() or self.rows[-1]
        shown = ", ".join(f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v!r}" for k, v in last.items())
        return f"History(rows={len(self.rows)}, the last: {shown})"

    def _repr_html_(self) -> str:
        """Return the evaluations, or the training rows if there are none, as a table for notebooks."""
        rows = [row for row in self.rows if row.get("split") == "valid"] or self.rows
        names = list(dict.fromkeys(name for row in rows for name in row if name not in ("split", "samples_per_second")))
        note = f"stopped: {self.stopped}" if self.stopped else ""
        if self.restored_step is not None:
            note += f"; weights of step {self.restored_step}"
        return html_table("History", names, [[row.get(name) for name in names] for row in rows], note)

    def last(self, split: str = "valid") -> dict[str, Any] | None:
        """Return the last row of a split, or None."""
        return next((row for row in reversed(self.rows) if row.get("split") == split), None)

    def of_model(self, split: str = "valid") -> dict[str, Any] | None:
        """Return the row of a split that describes the current model: that of the restored step, or the last one.

        Example:
            >>> history = History([{"step": step, "split": "valid"} for step in (1, 2, 3)])
            >>> history.restored_step = 2
            >>> history.of_model()
            {'step': 2, 'split': 'valid'}
        """
        last = self.restored_step
        if last is None:
            return self.last(split)
        rows = [row for row in self.rows if row.get("split") == split and row["step"] <= last]
        return rows[-1] if rows else None


def finite_or_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for JSON, with NaN and infinities replaced by null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def has_direction(metric: str) -> bool:
    """Return whether higher or lower values of a metric are better, as opposed to neither.

    Example:
        >>> has_direction("auc"), has_direction("calibration")
        (True, False)
    """
    try:
        higher_is_better(metric)
    except ConfigError:
        return False
    return True
