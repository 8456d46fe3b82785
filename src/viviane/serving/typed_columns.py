"""Requests of typed columns, arrays of ids and numbers, to a batch in one native call.

It takes what servers and programs send most: of each column a NumPy array whose values can all be used. Anything else,
a list or a wrong value among them, goes through `viviane.serving.encoded_rows`, which names what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.ops.joined_columns import ANY_ID, JoinedColumn, prepare_join
from viviane.schema import CategoricalColumn, Schema
from viviane.serving.matrices import DENSE, ONE_HOT

_IDS: Final = frozenset(map(np.dtype, ("int32", "int64")))
_NUMBERS: Final = frozenset(map(np.dtype, ("float32", "float64")))
_FEW: Final = 64
"""Rows up to which columns are put one behind the other first: to ask an array for its address takes 3 us."""
_INT32: Final = np.iinfo(np.int32)


class TypedColumns:
    """Makes batches of typed columns, for a schema whose bags have a hotness and no weights.

    Args:
        schema: the columns.
        strict_ids: categorical columns whose ids have to be in range.
        origin: of its batches, for messages.
        matrices: dense numbers and one-hot ids come as a matrix each, see `viviane.serving.matrices`.
    """

    def __init__(self, schema: Schema, strict_ids: frozenset[str], origin: str, *, matrices: bool = False) -> None:
        self._layout, self._origin = Layout.of(schema), origin
        self._bags = {one.name: (one.hotness or 0, _type(one)) for one in schema.bags}
        self._widths = (schema.num_dense, len(schema.one_hot))
        self._id_type: Any = np.int64 if any(one.dtype == "int64" for one in schema.one_hot) else np.int32
        ranges = {one.name: _range(one, one.name in strict_ids) for one in schema.categorical}
        id_type = np.dtype(self._id_type).name
        inputs: list[tuple[str, JoinedColumn]] = []
        if matrices:
            every = tuple(ranges[one.name] for one in schema.one_hot)
            inputs += [(DENSE, JoinedColumn(0, 0, self._widths[0], "float32"))] if self._widths[0] else []
            inputs += [(ONE_HOT, JoinedColumn(1, 0, len(every), id_type, every))] if every else []
        else:
            starts = accumulate((one.dim for one in schema.dense), initial=0)
            for start, number in zip(starts, schema.dense, strict=False):
                inputs.append((number.name, JoinedColumn(0, start, number.dim, "float32")))
            for place, one in enumerate(schema.one_hot):
                inputs.append((one.name, JoinedColumn(1, place, 1, id_type, (ranges[one.name],))))
        for place, one in enumerate(schema.bags):
            width, dtype = one.hotness or 0, np.dtype(_type(one)).name
            inputs.append((one.name, JoinedColumn(2 + place, 0, width, dtype, (ranges[one.name],) * width)))
        self._inputs = [(name, one.width, _NUMBERS if one.dtype == "float32" else _IDS) for name, one in inputs]
        self._join = prepare_join([one for _, one in inputs])
        self._stacks = [
            (matrix, [one.name for one in columns], kinds)
            for matrix, columns, kinds in ((DENSE, schema.dense, _NUMBERS), (ONE_HOT, schema.one_hot, _IDS))
            if columns
        ]
        named_like_one = {DENSE, ONE_HOT} & {*self._bags}
        stackable = not (matrices or named_like_one) and self._stacks and all(one.dim == 1 for one in schema.dense)
        self._few = TypedColumns(schema, strict_ids, origin, matrices=True) if stackable else None

    @classmethod
    def of(
        cls, schema: Schema, strict_ids: frozenset[str], origin: str, *, matrices: bool = False
    ) -> TypedColumns | None:
        """Return one for a schema, or None where it has other bags."""
        usable = all(one.hotness is not None and one.weights is None for one in schema.bags)
        if not usable or not (schema.dense or schema.categorical):
            return None
        return cls(schema, strict_ids, origin, matrices=matrices)

    def batch(self, rows: Any) -> Batch | None:
        """Return a batch without labels, or None where the rows have to go another way."""
        if not isinstance(rows, Mapping):
            return None
        stacked = None if self._few is None else self._stacked(rows)
        if stacked is not None and self._few is not None:
            return self._few.batch({**{name: rows.get(name) for name in self._bags}, **stacked})
        found: list[NDArray[Any]] = []
        size = -1
        for name, width, kinds in self._inputs:
            values = rows.get(name)
            if type(values) is not np.ndarray or values.dtype not in kinds:
                return None
            shape = values.shape
            size = shape[0] if size < 0 and shape else size
            if shape != (size, width) and (shape != (size,) or width != 1):
                return None
            flags = values.flags
            if not (flags.c_contiguous and flags.aligned):
                values = np.array(values, order="C")
            found.append(values)
        if not size:
            return None
        return self._joined(found, size)

    def _stacked(self, rows: Mapping[str, Any]) -> dict[str, NDArray[Any]] | None:
        """Return few rows as matrices; None where they are many, or not what such rows are."""
        found: dict[str, NDArray[Any]] = {}
        flat: tuple[int, ...] | None = None
        for matrix, names, kinds in self._stacks:
            columns: list[Any] = [rows.get(name) for name in names]
            for values in columns:
                if type(values) is not np.ndarray or values.dtype not in kinds:
                    return None
                if flat is None:
                    flat = values.shape[:1]
                    if not flat or flat[0] > _FEW:
                        return None
                if values.shape not in (flat, (*flat, 1)):
                    return None
            found[matrix] = np.concatenate(columns, axis=None).reshape(len(names), len(columns[0])).T
        return found

    def _joined(self, found: list[NDArray[Any]], size: int) -> Batch | None:
        dense, one_hot = np.empty((size, self._widths[0]), np.float32), np.empty((size, self._widths[1]), self._id_type)
        bags = {name: np.empty((size, hotness), dtype) for name, (hotness, dtype) in self._bags.items()}
        if not self._join(found, [dense, one_hot, *bags.values()]):
            return None
        return Batch(
            layout=self._layout,
            labels=torch.zeros(size, 0),
            dense=torch.from_numpy(dense),
            one_hot=torch.from_numpy(one_hot),
            bags={
                name: Bag(torch.from_numpy(ids.reshape(-1)), torch.arange(size + 1) * ids.shape[1])
                for name, ids in bags.items()
            },
            origin=self._origin,
        )


def _type(column: CategoricalColumn) -> Any:
    return np.int64 if column.dtype == "int64" else np.int32


def _range(column: CategoricalColumn, strict: bool) -> tuple[int, int]:
    """Return the least and the greatest id that the column's tables take, or that its type can hold."""
    if strict and column.num_ids is not None:
        return 0, column.num_ids - 1
    return (int(_INT32.min), int(_INT32.max)) if column.dtype == "int32" else ANY_ID
