"""Columns of values: hashed by their distinct values, lists cut and made whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.cells import list_parts
from viviane.etl.columns import DenseSpec, LabelSpec
from viviane.etl.engine import Build
from viviane.etl.expressions import hashed
from viviane.etl.operators import State, chain_column


def hash_values(column: Any, evaluate: Callable[[pa.Table, Build], pa.Table]) -> Any:
    """Return the 60-bit hash of each value as int64, missing where the value is; each distinct value is hashed once."""
    encoded = combined(column).dictionary_encode()
    distinct = evaluate(pa.table({"value": encoded.dictionary}), _hash_of_value)
    return combined(distinct.column("hash")).take(encoded.indices)


def raw_ids(column: Any, evaluate: Callable[[pa.Table, Build], pa.Table]) -> Any:
    """Return whole numbers as they are, other values as their 60-bit hash: int64, missing where the value is."""
    values = combined(column)
    if pa.types.is_uint64(values.type):
        return values.view(pa.int64())
    return values.cast(pa.int64()) if pa.types.is_integer(values.type) else hash_values(values, evaluate)


def number_column(spec: LabelSpec | DenseSpec, values: Any, states: dict[int, State]) -> Any:
    """Return the numbers of a label or dense column: after its operators, or of texts whether they are positive."""
    if isinstance(spec, LabelSpec) and spec.positive:
        positive = pc.is_in(values, value_set=pa.array(spec.positive, pa.string()))
        return pc.if_else(pc.is_null(values), pa.scalar(None, pa.float64()), positive.cast(pa.float64()))
    return chain_column(values, spec.operators, states)


def _hash_of_value(table: Any) -> dict[str, Any]:
    return {"hash": hashed(table["value"])}


def combined(column: Any) -> Any:
    """Return a column as one array."""
    while isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


class ListShape:
    """How the lists of a column are cut and filled: a missing list becomes missing values, a long one is cut.

    Args:
        lists: a list array of B rows.
        max_length: longest list kept; None keeps all.
        keep: "last" keeps the end of a long list, "first" its beginning.
        missing_length: how many missing values a missing list becomes.

    Example:
        >>> shape = ListShape(pa.array([[1, 2, 3], None, []]), 2, "last")
        >>> shape.offsets.tolist(), shape.flat(pa.array([[1, 2, 3], None, []])).to_pylist(), shape.num_cut
        ([0, 2, 3, 3], [2, 3, None], 1)
    """

    def __init__(self, lists: Any, max_length: int | None, keep: str, missing_length: int = 1) -> None:
        offsets, _ = list_parts(lists)
        null = pc.is_null(lists).to_numpy(zero_copy_only=False)
        lengths = np.diff(offsets)
        kept = lengths if max_length is None else np.minimum(lengths, max_length)
        self.num_cut = int(np.count_nonzero(kept < lengths))
        self._changed = bool(self.num_cut or null.any())
        kept = np.where(null, missing_length, kept)
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(kept)])  # (B + 1,)
        if self._changed:
            starts = offsets[1:] - kept if keep == "last" else offsets[:-1]
            starts = np.where(null, 0, starts)  # what is taken there is masked
            inside = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], kept)
            self._indices = pa.array(np.repeat(starts, kept) + inside, mask=np.repeat(null, kept))

    def flat(self, lists: Any) -> Any:
        """Return the flat values of a list array with the rows' lengths that this shape was made for."""
        values = pc.list_flatten(lists)
        return values.take(self._indices) if self._changed else values

    def spread(self, values: Any) -> Any:
        """Return single values of the rows, each as often as its row's list has values."""
        return values.take(pa.array(np.repeat(np.arange(len(values)), np.diff(self.offsets))))


def missing_together(columns: list[Any]) -> list[Any]:
    """Return columns of which the lists are missing wherever one of them is, so that they are equally long."""
    lists = [column for column in columns if pa.types.is_list(column.type)]
    if len(lists) < 2 or not any(column.null_count for column in lists):
        return columns
    there = pc.is_valid(lists[0])
    for column in lists[1:]:
        there = pc.and_(there, pc.is_valid(column))
    missing = {one.type: pa.scalar(None, one.type) for one in lists}
    return [combined(pc.if_else(there, one, missing[one.type])) if one.type in missing else one for one in columns]
