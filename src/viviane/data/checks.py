"""Validation of values against the schema: vectorized per column; the offending row is searched only on failure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import DataError, KeyRangeError
from viviane.schema import CategoricalColumn, LabelColumn


@dataclass(frozen=True)
class CellLocation:
    """One column of one row group, for messages; rows are counted from 0 within the file."""

    file: str
    group: int
    first_row: int
    column: str
    unit: str = "row group"

    def row(self, number: int) -> str:
        """Describe one row of the group."""
        return f"{self.file}, {self.unit} {self.group}, column {self.column!r}, row {self.first_row + number}"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.group}, column {self.column!r}"


def check_no_nulls(array: Any, place: CellLocation) -> None:
    """Refuse an Arrow array with nulls.

    Raises:
        DataError: there is a null; names the first row.
    """
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(
            "the data contain a null",
            where=place.row(row),
            fix="replace missing values: id 1 in categorical columns, a number in dense ones (`viviane etl` does)",
        )


def check_ids(
    ids: NDArray[Any], column: CategoricalColumn, place: CellLocation, offsets: NDArray[np.int64] | None = None
) -> None:
    """Refuse ids outside 0 <= id < num_ids, for raw ids nothing is refused; `offsets` maps the ids of bags to rows.

    Raises:
        KeyRangeError: an id is out of range; names the first row and its id.
    """
    if column.num_ids is None or not len(ids) or (ids.min() >= 0 and ids.max() < column.num_ids):
        return
    at = int(np.argmax((ids < 0) | (ids >= column.num_ids)))
    raise KeyRangeError(
        "an id is outside the range of its column",
        where=place.row(_row_of(at, offsets)),
        value=int(ids[at]),
        allowed=f"0 <= id < {column.num_ids}",
        fix="the data do not match schema.json: write both with the same ETL, or correct num_ids",
    )


def check_lengths(offsets: NDArray[np.int64], column: CategoricalColumn, place: CellLocation) -> None:
    """Refuse a bag or sequence longer than the column's max_length, or whose length differs from its hotness.

    Raises:
        DataError: a length is invalid; names the first row and its length.
    """
    if (column.max_length is None and column.hotness is None) or len(offsets) < 2:
        return
    lengths = np.diff(offsets)
    if column.hotness is not None and (lengths != column.hotness).any():
        row = int(np.argmax(lengths != column.hotness))
        raise DataError(
            "the number of ids of a bag differs from the column's hotness",
            where=place.row(row),
            value=f"{lengths[row]} ids",
            allowed=f"{column.hotness} (hotness)",
            fix="remove hotness from schema.json, or write the data set with this many ids in every row",
        )
    if column.max_length is not None and lengths.max() > column.max_length:
        row = int(np.argmax(lengths > column.max_length))
        raise DataError(
            "a bag of ids is too long",
            where=place.row(row),
            value=f"{lengths[row]} ids",
            allowed=f"at most {column.max_length} (max_length)",
            fix="truncate the lists when writing the data set, or raise max_length in the schema",
        )


def check_labels(values: NDArray[Any], column: LabelColumn, place: CellLocation) -> None:
    """Refuse a binary label other than 0 and 1 (or -1, if it is optional), and a regression label that is not finite.

    Raises:
        DataError: a label is invalid; names the first row and its value.
    """
    if column.task == "regression":
        check_finite(values, place)
        return
    good = (values == 0) | (values == 1)
    if column.optional:
        good |= values == -1
    if not good.all():
        row = int(np.argmin(good))
        raise DataError(
            "a binary label is neither 0 nor 1",
            where=place.row(row),
            value=values[row].item(),
            allowed="0, 1, or -1 for none" if column.optional else "0 or 1",
            fix='declare the label with task "regression" if it is a real number',
        )


def check_finite(values: NDArray[Any], place: CellLocation, offsets: NDArray[np.int64] | None = None) -> None:
    """Refuse NaN and infinity.

    Raises:
        DataError: a value is not finite; names the first row and its value.
    """
    if not len(values) or values.dtype.kind != "f":
        return
    # a single NaN makes minimum and maximum NaN
    if math.isfinite(values.min()) and math.isfinite(values.max()):
        return
    finite = np.isfinite(values)
    at = int(np.argmin(finite))
    _refuse(values[at], place.row(_row_of(at, offsets)), "a value is not finite", "finite values")


def check_weights(values: NDArray[np.float32], place: CellLocation, offsets: NDArray[np.int64] | None = None) -> None:
    """Refuse sample weights that are not finite or are negative.

    Raises:
        DataError: a weight is invalid; names the first row and its value.
    """
    check_finite(values, place, offsets)
    if len(values) and values.min() < 0:
        at = int(np.argmax(values < 0))
        _refuse(values[at], place.row(_row_of(at, offsets)), "a sample weight is negative", "weight >= 0")


def _refuse(value: Any, where: str, what: str, allowed: str) -> NoReturn:
    raise DataError(what, where=where, value=value.item(), allowed=allowed)


def _row_of(position: int, offsets: NDArray[np.int64] | None) -> int:
    return position if offsets is None else int(np.searchsorted(offsets, position, side="right")) - 1
