"""The columns of a stored row: the weight, the optimizer state, and where each begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, VivianeError
from viviane.core.json_files import expected_form, json_object

LAYOUT_VERSION: Final = 1
MAX_ROW_BYTES: Final = 1 << 20
_MAX_COLUMNS: Final = 64
_MAX_NAME: Final = 64

Keys = NDArray[np.int64]
Rows = NDArray[np.uint8]
Found = NDArray[np.bool_]

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
"""The types of columns, by torch's names, and the bytes of one number."""


@dataclass(frozen=True)
class Column:
    """A part of every row.

    Args:
        name: "weight", or the name of a state of the optimizer.
        dtype: a key of `ITEM_BYTES`.
        width: numbers in a row; at least 1.
    """

    name: str
    dtype: str
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes that the column takes in a row."""
        return ITEM_BYTES[self.dtype] * self.width


class RowLayout:
    """Which columns a row has and where they begin.

    Columns follow each other in their order. Each begins at a multiple of its number's size, and a row is a multiple
    of 8 bytes long; bytes between columns are zero.

    Args:
        columns: in their order; the first is usually "weight".

    Raises:
        ConfigError: a column has no name, an unknown type or no width, two have one name, or a row would be too long.

    Example:
        >>> layout = RowLayout([Column("weight", "float16", 3), Column("accumulator", "float32", 3)])
        >>> layout.offsets, layout.row_bytes
        ({'weight': 0, 'accumulator': 8}, 24)
        >>> RowLayout.from_json(layout.to_json()) == layout
        True
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        offsets: dict[str, int] = {}
        end = 0
        if not 1 <= len(self.columns) <= _MAX_COLUMNS:
            raise ConfigError("a row needs columns", value=len(self.columns), allowed=f"1 to {_MAX_COLUMNS}")
        for column in self.columns:
            _check_column(column, offsets)
            item = ITEM_BYTES[column.dtype]
            start = -(-end // item) * item
            offsets[column.name] = start
            end = start + column.num_bytes
        self.offsets: dict[str, int] = offsets
        self.row_bytes = -(-end // 8) * 8
        if self.row_bytes > MAX_ROW_BYTES:
            raise ConfigError("rows are too long", value=f"{self.row_bytes:,} bytes", allowed=f"{MAX_ROW_BYTES:,}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowLayout) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.columns)

    def __repr__(self) -> str:
        parts = ", ".join(f"{one.name} {one.dtype} x {one.width}" for one in self.columns)
        return f"RowLayout({parts}: {self.row_bytes} bytes)"

    def __getitem__(self, name: str) -> Column:
        try:
            return next(one for one in self.columns if one.name == name)
        except StopIteration:
            known = ", ".join(self.offsets)
            raise ConfigError("the rows have no such column", value=name, allowed=known) from None

    def column(self, rows: Rows, name: str) -> Rows:
        """Return the bytes of one column, a view (n, bytes of the column).

        Args:
            rows: (n, row_bytes).
            name: of the column.
        """
        start = self.offsets[self[name].name]
        return rows[:, start : start + self[name].num_bytes]

    def empty(self, count: int) -> Rows:
        """Return rows with any content, (count, row_bytes)."""
        return np.empty((count, self.row_bytes), np.uint8)

    def zeros(self, count: int) -> Rows:
        """Return rows of zeros, (count, row_bytes)."""
        return np.zeros((count, self.row_bytes), np.uint8)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON; `from_json` reads it again."""
        columns = [{"name": one.name, "dtype": one.dtype, "width": one.width} for one in self.columns]
        return {"version": LAYOUT_VERSION, "row_bytes": self.row_bytes, "columns": columns}

    @classmethod
    def from_json(cls, value: Any, *, where: str = "row layout", error: type[VivianeError] = ConfigError) -> RowLayout:
        """Read what `to_json` wrote; nothing in it is trusted.

        Raises:
            VivianeError: of class `error`: another version, another form, or a length that the columns do not give.
        """
        content = json_object(value, where=where, error=error)
        if content.get("version") != LAYOUT_VERSION:
            found = repr(content.get("version"))[:80]
            raise error("rows of another version", where=where, value=found, allowed=str(LAYOUT_VERSION))
        with expected_form(where, error):
            parts = [(one["name"], one["dtype"], one["width"]) for one in content["columns"]]
            if any(type(name) is not str or type(dtype) is not str for name, dtype, _ in parts):
                raise TypeError("name and dtype of a column are texts")
        try:
            layout = cls([Column(*part) for part in parts])
        except ConfigError as problem:
            raise error(problem.what, where=where, value=problem.value, allowed=problem.allowed) from None
        if content.get("row_bytes") != layout.row_bytes:
            found = repr(content.get("row_bytes"))[:80]
            raise error("the length of rows differs", where=where, value=found, allowed=str(layout.row_bytes))
        return layout

    # Checks of what tiers are called with ------------------------------------------------------------------------

    def check_keys(self, keys: Keys) -> None:
        """Refuse keys that are not int64, (n,), C-contiguous."""
        is_array = isinstance(keys, np.ndarray) and not isinstance(keys, np.ma.MaskedArray)
        if not is_array or keys.dtype != np.int64 or keys.ndim != 1 or not keys.flags.c_contiguous:
            raise ConfigError("keys have another form", value=_form(keys), allowed="int64 (n,), C-contiguous")

    def check_rows(self, keys: Keys, rows: Rows) -> None:
        """Refuse keys as `check_keys` does, and rows that are not uint8, (n, row_bytes), C-contiguous."""
        self.check_keys(keys)
        wanted = (len(keys), self.row_bytes)
        is_array = isinstance(rows, np.ndarray)
        if not is_array or rows.dtype != np.uint8 or rows.shape != wanted or not rows.flags.c_contiguous:
            raise ConfigError("rows have another form", value=_form(rows), allowed=f"uint8 {wanted}, C-contiguous")

    def check_out(self, keys: Keys, out: Rows) -> None:
        """Refuse what `check_rows` does, and read-only rows, which compiled code would write nevertheless."""
        self.check_rows(keys, out)
        if not out.flags.writeable:
            raise ConfigError("rows that are written are read-only", value=_form(out), fix="pass an array of your own")


def _check_column(column: Column, known: Mapping[str, int]) -> None:
    if not 1 <= len(column.name) <= _MAX_NAME or not column.name.isprintable():
        allowed = f"1 to {_MAX_NAME} printable characters"
        raise ConfigError("a column has no usable name", value=column.name[:80], allowed=allowed)
    if column.name in known:
        raise ConfigError("two columns of a row have one name", value=column.name)
    if column.dtype not in ITEM_BYTES:
        where = f"column {column.name!r}"
        raise ConfigError(
            "unknown type of a column", where=where, value=column.dtype[:80], allowed=", ".join(ITEM_BYTES)
        )
    if type(column.width) is not int or not 1 <= column.width <= MAX_ROW_BYTES:
        where = f"column {column.name!r}"
        raise ConfigError("a column has no usable width", where=where, value=column.width, allowed="1 to 1,048,576")


def _form(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    order = "" if value.flags.c_contiguous else ", not contiguous"
    return f"{value.dtype} {value.shape}{order}"
