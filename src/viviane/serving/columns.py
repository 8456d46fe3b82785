"""What a model takes and gives, as a server publishes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from viviane.etl.columns import InputColumn
from viviane.schema import CategoricalColumn, Schema

_RAW_TYPES: Final[dict[str, ColumnType]] = {
    "float": "float64",
    "int": "int64",
    "string": "string",
    "hex": "string",
    "timestamp": "string",
    "bool": "int64",
}
ColumnType = Literal["float32", "float64", "int32", "int64", "string"]


@dataclass(frozen=True)
class ColumnSpec:
    """A column of requests or replies.

    Args:
        name: of the column.
        dtype: of its values; "string" is UTF-8 text.
        shape: -1 for the rows of the request; a second number for the values of a row, -1 where rows differ.
        format: what the text of a raw column holds: "text", "hex" (up to 16 hexadecimal digits; whole numbers are
            taken, too), "timestamp", or "list" (values between `separator`); "" where values are numbers.
        separator: between the values of a list that is written as text.
        raw: the value is as logged; False: an id or a number as the ETL writes it.
        num_ids: ids are 0 <= id < num_ids; None where there is no such range. Of a matrix, the least of its columns'.
        nullable: None is a missing value.
        columns: of a matrix, the columns that are side by side in it.

    Example:
        >>> raw_columns([InputColumn(name="price", type="float")])[0].shape
        (-1,)
    """

    name: str
    dtype: ColumnType
    shape: tuple[int, ...]
    raw: bool
    format: Literal["", "text", "hex", "timestamp", "list"] = ""
    separator: str | None = None
    num_ids: int | None = None
    nullable: bool = False
    columns: tuple[str, ...] = ()

    @property
    def is_ragged(self) -> bool:
        """Whether rows may hold different numbers of values."""
        return len(self.shape) > 1 and self.shape[1] < 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a reply."""
        return {**asdict(self), "shape": list(self.shape)}


def raw_columns(columns: Iterable[InputColumn]) -> tuple[ColumnSpec, ...]:
    """Describe columns as they are logged."""
    found = []
    for one in columns:
        formats: dict[str, Any] = {"string": "text", "hex": "hex", "timestamp": "timestamp"}
        dtype, form = _RAW_TYPES[one.type], formats.get(one.type, "")
        if one.separator is not None:
            found.append(ColumnSpec(one.name, "string", (-1,), True, "list", one.separator, nullable=True))
        else:
            shape = (-1, -1) if one.list else (-1,)
            found.append(ColumnSpec(one.name, dtype, shape, True, form, nullable=True))
    return tuple(found)


def encoded_columns(schema: Schema) -> tuple[ColumnSpec, ...]:
    """Describe columns as the ETL writes them."""
    found = [
        ColumnSpec(one.name, "float32", (-1,) if one.dim == 1 else (-1, one.dim), raw=False) for one in schema.dense
    ]
    for column in schema.categorical:
        found.append(ColumnSpec(column.name, column.dtype, _id_shape(column), raw=False, num_ids=column.num_ids))
        if column.weights is not None:
            found.append(ColumnSpec(column.weights, "float32", _id_shape(column), raw=False))
    return tuple(found)


def output_columns(schema: Schema) -> tuple[ColumnSpec, ...]:
    """Describe the predictions: one column a label."""
    return tuple(ColumnSpec(label.name, "float32", (-1,), raw=False) for label in schema.labels)


def _id_shape(column: CategoricalColumn) -> tuple[int, ...]:
    return (-1,) if column.kind == "one_hot" else (-1, column.hotness or -1)
