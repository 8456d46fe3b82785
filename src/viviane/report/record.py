"""Read back what a run left in its folder; a part that is absent is left empty, one that is broken is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import DataError
from viviane.core.json_files import json_object, parse_json, read_json
from viviane.report.importance import IMPORTANCE_FILE
from viviane.report.shapes import DataInfo, Histogram, Importance, Machine, MetricsRow, Shape, Tiers, checked
from viviane.schema import SCHEMA_FILE, Schema
from viviane.training.run_folder import MACHINE_FILE, TIERS_FILE

NOT_METRICS: Final = frozenset(("step", "epoch", "split", "loss", "seconds", "samples_per_second", "lr"))


@dataclass(frozen=True)
class RunRecord:
    """Everything the report shows.

    Args:
        folder: the run folder.
        config: settings of the run, as written at its start.
        schema: the data's columns.
        rows: the lines of metrics.jsonl.
        stages: seconds per stage.
        histogram: bins of predicted probability at the last evaluation.
        data: the training set's info.json: rows, value counts, best reachable AUC where the data is synthetic.
        graph: the model's graph as JSON; empty for a module that is not a graph.
        machine: machine, versions, and start and time of each fit.
        tiers: of tables in tiers, their place, hits and bytes by tier.
        importance: what `permutation_importance` measured.
        model_bytes: size of the saved model; 0 if there is none.
    """

    folder: Path
    schema: Schema
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    stages: dict[str, Any] = field(default_factory=dict)
    histogram: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    importance: dict[str, Any] = field(default_factory=dict)
    model_bytes: int = 0

    @classmethod
    def load(cls, folder: str | Path) -> RunRecord:
        """Read a run folder.

        Raises:
            DataError: the folder holds no run, or one of its files is not what it should be.
        """
        path = Path(folder)
        if not (path / "metrics.jsonl").exists() or not (path / SCHEMA_FILE).exists():
            raise DataError(
                "this folder holds no run",
                where=str(path),
                allowed=f"a folder with metrics.jsonl and {SCHEMA_FILE}",
                fix="train with a run folder: `viviane train config.json --run-folder runs/mine`",
            )
        return cls(
            folder=path,
            schema=Schema.load(path),
            config=_read(path / "config.json"),
            rows=_read_lines(path / "metrics.jsonl"),
            stages=_read(path / "stages.json"),
            histogram=_read(path / "valid_histogram.json", Histogram),
            data=_read(path / "data_info.json", DataInfo),
            graph=_read(path / "model" / "model.json"),
            machine=_read(path / MACHINE_FILE, Machine),
            tiers=_read(path / TIERS_FILE, Tiers),
            importance=_read(path / IMPORTANCE_FILE, Importance),
            model_bytes=sum(file.stat().st_size for file in (path / "model").rglob("*") if file.is_file()),
        )

    def curve(self, split: str, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of one measure of one split."""
        return [
            (float(row["step"]), float(row[key]))
            for row in self.rows
            if row.get("split") == split and isinstance(row.get(key), int | float)
        ]

    @property
    def metric_names(self) -> list[str]:
        """Measures of the validation rows besides the loss, in the order they were recorded."""
        skip = NOT_METRICS
        names: dict[str, None] = {}
        for row in self.rows:
            if row.get("split") == "valid":
                names.update(dict.fromkeys(key for key in row if key not in skip))
        return list(names)


def _read(path: Path, shape: type[Shape] | None = None) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json_object(read_json(path, error=DataError), where=str(path), error=DataError)
    return value if shape is None else checked(value, shape, str(path))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError("cannot read the metrics of the run", where=str(path), value=str(error)) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, where=f"{path}, line {number}", error=DataError)
        except DataError:
            if number == len(lines):
                break  # a run that was killed may leave half a last line
            raise
        where = f"{path}, line {number}"
        rows.append(checked(json_object(row, where=where, error=DataError), MetricsRow, where))
    return rows
