"""What the files of a run folder must contain for a report; other keys are free."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from viviane.core.errors import DataError

Number = Annotated[int | float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
Amount = Annotated[int | float, Field(allow_inf_nan=False, ge=0, le=1e300)]
Point = Annotated[list[Number], Field(min_length=2, max_length=2)]
_FREE: Final = ConfigDict(extra="allow", strict=True)


@with_config(_FREE)
class MetricsRow(TypedDict):
    """A line of metrics.jsonl."""

    step: Amount
    split: str
    samples_per_second: NotRequired[Amount | None]


@with_config(_FREE)
class Fit(TypedDict):
    """A fit in machine.json."""

    started: NotRequired[str]
    seconds: Amount
    peak_memory_bytes: NotRequired[Amount | None]
    peak_gpu_memory_bytes: NotRequired[Amount | None]


@with_config(_FREE)
class Machine(TypedDict):
    """machine.json."""

    versions: NotRequired[dict[str, Any]]
    fits: NotRequired[list[Fit]]


@with_config(_FREE)
class ColumnInfo(TypedDict):
    """A column in data_info.json."""

    num_missing: NotRequired[Amount | None]
    num_unknown: NotRequired[Amount | None]
    top_counts: NotRequired[list[Amount] | list[Point]]


@with_config(_FREE)
class DataInfo(TypedDict):
    """data_info.json."""

    rows: NotRequired[Amount | None]
    best_auc: NotRequired[Number]
    best_log_loss: NotRequired[Number | None]
    columns: NotRequired[dict[str, ColumnInfo]]


@with_config(_FREE)
class Curve(TypedDict):
    """The curves of a label in valid_histogram.json."""

    rows: NotRequired[Amount | None]
    positives: Amount
    roc: list[Point]
    pr: list[Point]


@with_config(_FREE)
class Bin(TypedDict):
    """Predictions of one range in valid_histogram.json."""

    count: Amount
    mean_prediction: Number | None
    mean_label: Number | None


@with_config(_FREE)
class Histogram(TypedDict):
    """valid_histogram.json."""

    curves: NotRequired[dict[str, Curve]]
    bins: NotRequired[list[Bin]]


@with_config(_FREE)
class Placement(TypedDict):
    """A table in tiers.json."""

    rows: Annotated[int, Field(gt=0)]
    rows_in_memory: Amount
    memory_bytes: Amount
    rows_on_disk: Amount
    row_bytes: Amount


@with_config(_FREE)
class Moves(TypedDict):
    """A tier in tiers.json."""

    hits: Amount
    misses: Amount
    bytes_read: Amount
    bytes_written: Amount


@with_config(_FREE)
class Tiers(TypedDict):
    """tiers.json."""

    tables: NotRequired[dict[str, Placement]]
    tiers: NotRequired[dict[str, Moves]]


@with_config(_FREE)
class ColumnImportance(TypedDict):
    """A column in importance.json."""

    name: str
    log_loss: Number


@with_config(_FREE)
class Importance(TypedDict):
    """importance.json."""

    label: str
    rows: Amount
    log_loss: Number
    features: list[ColumnImportance]


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def checked(content: dict[str, Any], shape: Any, where: str) -> dict[str, Any]:
    """Return the content of a file if it has a shape; an absent file, {}, has every shape.

    Raises:
        DataError: a value has another type or is out of range; names it.
    """
    if content:
        try:
            _adapter(shape).validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(
                "a file of the run folder is damaged", where=f"{where}, {place}",
                value=f"{first['msg']}: {str(first['input'])[:100]}",
                fix="take the file from a copy of the run, or remove it",
            ) from None  # fmt: skip
    return content
