"""The layout of a block's sections in a file of Viviane's own format.

A block is R rows. Its sections, each aligned to 64 bytes, little endian, in this order:

    labels    (R, L)      uint8 if all labels are binary, else float32
    dense     (R, N)      float32
    one-hot   (R, F)      layout "rows": one matrix of the narrowest type that holds every column
              (R,) each   layout "columns": each column in the narrowest type that holds it
    weight    (R,)        float32, if the schema has a sample weight
    per bag   (R + 1,)    offsets of the rows' ids, from 0: uint32, or int64 from 2^32 ids on
              (nnz,)      ids in the narrowest type
              (nnz,)      float32, if the bag has weights

The layout follows from the schema, the layout, R and the nnz of each bag. Narrowest of uint8, uint16, int32, int64:
by num_ids, not by the ids that occur; raw ids are int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from viviane.data.row_buffer import RowView
from viviane.schema import CategoricalColumn, Schema

ALIGNMENT: Final = 64
_RAW: Final = 1 << 63  # raw ids have no range
_TYPES: Final = (("u1", 1 << 8), ("<u2", 1 << 16), ("<i4", 1 << 31), ("<i8", 1 << 63))

IdLayout = Literal["rows", "columns"]


@dataclass(frozen=True)
class Section:
    """One array of a block."""

    kind: Literal["labels", "dense", "one_hot", "weight", "offsets", "ids", "id_weights"]
    index: int  # index of the bag, or of the first one-hot column
    start: int  # byte offset in the block
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes without alignment padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def array(self, data: NDArray[np.uint8], block: int) -> NDArray[Any]:
        """Return the section of the block that begins at byte `block` of a file."""
        start = block + self.start
        return data[start : start + self.num_bytes].view(self.dtype).reshape(self.shape)


def narrowest(columns: Sequence[CategoricalColumn]) -> str:
    """Return the narrowest type that holds the ids of all columns.

    Example:
        >>> narrowest([CategoricalColumn(name="c", num_ids=256)]), narrowest([CategoricalColumn(name="c", num_ids=257)])
        ('u1', '<u2')
    """
    largest = max((column.num_ids or _RAW for column in columns), default=1)
    return next(name for name, limit in _TYPES if largest <= limit)


def sections(schema: Schema, layout: IdLayout, rows: int, nnz: Sequence[int]) -> tuple[list[Section], int]:
    """Return the sections of a block, and its size in bytes."""
    found: list[Section] = []
    end = 0
    for kind, index, dtype, shape in _planned(schema, layout, rows, nnz):
        section = Section(kind, index, end, dtype, shape)
        found.append(section)
        end = -(-(end + section.num_bytes) // ALIGNMENT) * ALIGNMENT
    return found, end


def _planned(
    schema: Schema, layout: IdLayout, rows: int, nnz: Sequence[int]
) -> Iterator[tuple[Any, int, str, tuple[int, ...]]]:
    if schema.labels:
        binary = all(label.task == "binary" for label in schema.labels)
        yield "labels", 0, "u1" if binary else "<f4", (rows, len(schema.labels))
    if schema.dense:
        yield "dense", 0, "<f4", (rows, schema.num_dense)
    if schema.one_hot and layout == "rows":
        yield "one_hot", 0, narrowest(schema.one_hot), (rows, len(schema.one_hot))
    elif schema.one_hot:
        for index, column in enumerate(schema.one_hot):
            yield "one_hot", index, narrowest([column]), (rows, 1)
    if schema.sample_weight is not None:
        yield "weight", 0, "<f4", (rows,)
    for index, (bag, count) in enumerate(zip(schema.bags, nnz, strict=True)):
        yield "offsets", index, "<u4" if count < 1 << 32 else "<i8", (rows + 1,)
        yield "ids", index, narrowest([bag]), (count,)
        if bag.weights is not None:
            yield "id_weights", index, "<f4", (count,)


def content(section: Section, view: RowView, schema: Schema) -> NDArray[Any]:
    """Return the content of a section, from rows that match the schema."""
    match section.kind:
        case "labels" | "dense" | "one_hot":
            matrix = getattr(view, section.kind)[0][1]
            array: NDArray[Any] = matrix[:, section.index : section.index + section.shape[1]]
        case "weight":
            assert view.weight is not None
            array = view.weight
        case _:
            bag = view.bags[schema.bags[section.index].name]
            named = {"offsets": bag.offsets, "ids": bag.values, "id_weights": bag.weights}[section.kind]
            assert named is not None
            array = named
    return np.ascontiguousarray(array, dtype=section.dtype)
