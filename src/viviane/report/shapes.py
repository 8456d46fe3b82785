"""What the files of a run folder must contain for a report; other keys are free."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from viviane.core.errors import DataError

Number = Annotated[int | float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
Amount = Annotated[int | float, Field(allow_inf_nan=False, ge=0, le=1e300)]
Point = Annotated[list[Number], Field(min_length=2, max_length=2)]


class Shape(BaseModel):
    """Keys with their types; a default means that a key may be absent."""

    model_config = ConfigDict(extra="allow", strict=True)


class MetricsRow(Shape):
    """A line of metrics.jsonl."""

    step: Amount
    split: str
    samples_per_second: Amount | None = None


class Fit(Shape):
    """A fit in machine.json."""

    started: str = ""
    seconds: Amount
    peak_memory_bytes: Amount | None = None
    peak_gpu_memory_bytes: Amount | None = None


class Machine(Shape):
    """machine.json."""

    versions: dict[str, Any] = {}
    fits: list[Fit] = []


class ColumnInfo(Shape):
    """A column in data_info.json."""

    num_missing: Amount | None = None
    num_unknown: Amount | None = None
    top_counts: list[Amount] | list[Point] = []


class DataInfo(Shape):
    """data_info.json."""

    rows: Amount | None = None
    best_auc: Number = 0
    best_log_loss: Number | None = None
    columns: dict[str, ColumnInfo] = {}


class Curve(Shape):
    """The curves of a label in valid_histogram.json."""

    rows: Amount | None = None
    positives: Amount
    roc: list[Point]
    pr: list[Point]


class Bin(Shape):
    """Predictions of one range in valid_histogram.json."""

    count: Amount
    mean_prediction: Number | None
    mean_label: Number | None


class Histogram(Shape):
    """valid_histogram.json."""

    curves: dict[str, Curve] = {}
    bins: list[Bin] = []


class Placement(Shape):
    """A table in tiers.json."""

    rows: Annotated[int, Field(gt=0)]
    rows_in_memory: Amount
    memory_bytes: Amount
    rows_on_disk: Amount
    row_bytes: Amount


class Moves(Shape):
    """A tier in tiers.json."""

    hits: Amount
    misses: Amount
    bytes_read: Amount
    bytes_written: Amount


class Tiers(Shape):
    """tiers.json."""

    tables: dict[str, Placement] = {}
    tiers: dict[str, Moves] = {}


class ColumnImportance(Shape):
    """A column in importance.json."""

    name: str
    log_loss: Number


class Importance(Shape):
    """importance.json."""

    label: str
    rows: Amount
    log_loss: Number
    features: list[ColumnImportance]


def checked(content: dict[str, Any], shape: type[Shape], where: str) -> dict[str, Any]:
    """Return the content of a file if it has a shape; an absent file, {}, has every shape.

    Raises:
        DataError: a value has another type or is out of range; names it.
    """
    if content:
        try:
            shape.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(
                "a file of the run folder is damaged", where=f"{where}, {place}",
                value=f"{first['msg']}: {str(first['input'])[:100]}",
                fix="take the file from a copy of the run, or remove it",
            ) from None  # fmt: skip
    return content
