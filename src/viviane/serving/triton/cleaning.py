"""Raw rows to tensors of encoded rows: the first step of an ensemble."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.batch import Bag, Batch
from viviane.etl import FittedEtl
from viviane.model.saving import ETL_FILE
from viviane.schema import Schema
from viviane.serving.columns import ColumnSpec, raw_columns
from viviane.serving.encoding import RowEncoder
from viviane.serving.errors import RowsError
from viviane.serving.server.tensors import LENGTHS


class Cleaner:
    """The ETL of a saved model, without its weights.

    Args:
        model: the folder of the saved model, which has an ETL.
    """

    def __init__(self, model: Path) -> None:
        self._schema = Schema.load(model)
        self._encoder = RowEncoder(self._schema, FittedEtl.load(model / ETL_FILE), frozenset())

    @property
    def inputs(self) -> tuple[ColumnSpec, ...]:
        """The raw columns."""
        return raw_columns(self._encoder.raw_columns)

    def tensors(self, rows: Mapping[str, Any] | list[Any]) -> dict[str, NDArray[Any]]:
        """Return the tensors of encoded rows; lists are padded, with their lengths beside them.

        Raises:
            RowsError: a row cannot be used.
        """
        batch, problems = self._encoder.encode(rows, raw=True)
        if problems:
            raise RowsError.of(problems)
        found: dict[str, NDArray[Any]] = {}
        for name, _ in batch.layout.dense:
            found[name] = _matrix(batch.dense_feature(name).numpy(), np.float32)
        for column in self._schema.categorical:
            dtype: Any = np.int32 if column.dtype == "int32" else np.int64
            if column.name in batch.bags:
                found |= _padded(column.name, column.weights, batch, dtype, fixed=column.hotness is not None)
            else:
                place = batch.layout.one_hot_index[column.name]
                found[column.name] = _matrix(batch.one_hot[:, place].numpy(), dtype)
        return found


def _matrix(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(values.reshape(len(values), -1), dtype=dtype)


def _padded(name: str, weights: str | None, batch: Batch, dtype: Any, *, fixed: bool) -> dict[str, NDArray[Any]]:
    bag: Bag = batch.bags[name]
    lengths = bag.lengths.numpy()
    width = max(1, int(lengths.max(initial=0)))  # a tensor of width 0 has no bytes to pass on
    there = np.arange(width) < lengths[:, None]
    ids = np.zeros(there.shape, dtype)
    ids[there] = bag.values.numpy()
    found = {name: ids}
    if not fixed:
        found[name + LENGTHS] = _matrix(lengths, np.int32)
    if weights is not None:
        numbers = np.zeros(there.shape, np.float32)
        numbers[there] = 1.0 if bag.weights is None else bag.weights.numpy()
        found[weights] = numbers
        if not fixed:
            found[weights + LENGTHS] = _matrix(lengths, np.int32)
    return found
