"""Shapes of tensors whose rows are not the batch's: DIN's ten history rows per sample, or a fixed number of rows.

A shape leaves the first dimension out. Nearly always that is the batch, B, and a plain tuple is enough; a
`RowShape` is a tuple with another first dimension: (10 B, n), or (4, n).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

Shape: TypeAlias = tuple[int, ...]
MAX_SIZE: Final = 2**31 - 1
"""Of a dimension that a layer's parameters name."""
Size: TypeAlias = Annotated[int, Field(ge=1, le=MAX_SIZE)]


@dataclass(frozen=True)
class Rows:
    """Length of a tensor's first dimension: count times B, or count alone.

    Example:
        >>> str(Rows(10)), str(Rows()), str(Rows(4, of_batch=False))
        ('10 B', 'B', '4')
    """

    count: int = 1
    of_batch: bool = True

    def times(self, factor: int) -> Rows:
        """Return this many times as many rows."""
        return Rows(self.count * factor, self.of_batch)

    def __str__(self) -> str:
        if not self.of_batch:
            return str(self.count)
        return "B" if self.count == 1 else f"{self.count} B"


BATCH: Final = Rows()


class RowShape(tuple[int, ...]):
    """A shape without its first dimension, and how long that one is.

    Example:
        >>> RowShape((3,), Rows(10)) == (3,), RowShape((3,)) == (3,)
        (False, True)
    """

    rows: Rows

    def __new__(cls, sizes: Iterable[int], rows: Rows = BATCH) -> RowShape:  # noqa: D102
        shape = super().__new__(cls, sizes)
        shape.rows = rows
        return shape

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and rows_of(other) == self.rows

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self) if self.rows == BATCH else hash((tuple(self), self.rows))


def rows_of(shape: object) -> Rows:
    """Return the rows of a shape; a plain tuple has the batch's."""
    return shape.rows if isinstance(shape, RowShape) else BATCH


def with_rows(shape: Iterable[int], rows: Rows) -> Shape:
    """Return a shape with these rows; a plain tuple where they are the batch's."""
    return tuple(shape) if rows == BATCH else RowShape(shape, rows)


def show_shape(shape: Iterable[Any]) -> str:
    """Write a shape with its rows.

    Example:
        >>> show_shape((26, 16)), show_shape(RowShape((16,), Rows(26)))
        ('(B, 26, 16)', '(26 B, 16)')
    """
    return "(" + ", ".join([str(rows_of(shape)), *map(str, shape)]) + ")"
