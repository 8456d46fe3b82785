"""Synthetic rows for any schema, in memory and in files: random labels, power-law ids.

Shapes: B rows, F one-hot columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.bench.workload import draw_ids
from viviane.data import Dataset, write_dataset
from viviane.schema import CategoricalColumn, Schema

_RAW_IDS: Final = 100_000  # distinct ids of a column without num_ids
_HOTNESS: Final = 5  # maximum ids of a bag without max_length
_BLOCK_ROWS: Final = 131_072


def criteo_schema(rows: tuple[int, ...], num_dense: int = 13) -> Schema:
    """Return one label, dense columns, and one one-hot column per table.

    Example:
        >>> criteo_schema((10, 20), num_dense=2).num_dense
        2
    """
    return Schema(
        labels=[{"name": "click"}],
        dense=[{"name": f"i{n}"} for n in range(1, num_dense + 1)],
        categorical=[{"name": f"c{n}", "num_ids": size} for n, size in enumerate(rows, 1)],
    )


class Samples:
    """Draws rows of a schema; smaller ids of a column are more frequent.

    Args:
        schema: the columns.
        ids: "power-law" or "uniform"; see `draw_ids`.
        exponent: exponent of the power law.
        seed: seed of the rows.

    Example:
        >>> batch = Samples(criteo_schema((10, 20))).batch(4)
        >>> batch.size, tuple(batch.one_hot.shape), bool((batch.one_hot < 20).all())
        (4, (4, 2), True)
    """

    def __init__(self, schema: Schema, ids: str = "power-law", exponent: float = 1.1, seed: int = 0) -> None:
        self.schema = schema
        self._ids, self._exponent = ids, exponent
        self._random = np.random.default_rng(seed)

    def batch(self, size: int) -> Batch:
        """Draw a batch of B rows, in host memory."""
        schema, random = self.schema, self._random
        labels = [(random.random(size) < 0.25).astype(np.float32) for _ in schema.labels]
        one_hot = [self._column(column, size) for column in schema.one_hot]
        wide = np.int64 if any(column.dtype == "int64" for column in schema.one_hot) else np.int32
        return Batch(
            Layout.of(schema),
            labels=torch.from_numpy(_stack(labels, size, np.float32)),
            dense=torch.from_numpy(random.random((size, schema.num_dense), dtype=np.float32)),
            one_hot=torch.from_numpy(_stack(one_hot, size, wide)),
            bags={column.name: self._bag(column, size) for column in schema.bags},
            weight=torch.ones(size) if schema.sample_weight is not None else None,
            origin="synthetic rows",
        )

    def _column(self, column: CategoricalColumn, size: int) -> NDArray[Any]:
        rows, seed = [column.num_ids or _RAW_IDS], int(self._random.integers(2**31))
        [drawn] = draw_ids(rows, size, self._ids, self._exponent, count=1, seed=seed)
        return drawn[:, 0].numpy().astype(column.dtype)

    def _bag(self, column: CategoricalColumn, size: int) -> Bag:
        if column.hotness is None:
            lengths = self._random.integers(1, min(column.max_length or _HOTNESS, _HOTNESS) + 1, size)
        else:
            lengths = np.full(size, column.hotness)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = self._column(column, int(offsets[-1]))
        weights = torch.rand(len(values)) if column.weights else None
        return Bag(torch.from_numpy(values), torch.from_numpy(offsets), weights)

    def write(self, folder: str | Path, rows: int) -> Dataset:
        """Write rows as a data set in Viviane's format, which is read at memory speed."""
        return write_dataset(folder, self.schema, self._tables(rows), format="viviane")

    def _tables(self, rows: int) -> Iterator[dict[str, Any]]:
        for start in range(0, rows, _BLOCK_ROWS):
            yield columns_of(self.schema, self.batch(min(_BLOCK_ROWS, rows - start)))


def columns_of(schema: Schema, batch: Batch) -> dict[str, Any]:
    """Return a batch as columns by name."""
    found: dict[str, Any] = {name: batch.label(name).numpy() for name in batch.layout.labels}
    for name, dim in batch.layout.dense:
        values = batch.dense_feature(name).contiguous().numpy()
        found[name] = values[:, 0] if dim == 1 else pa.FixedSizeListArray.from_arrays(_array(values.reshape(-1)), dim)
    for i, name in enumerate(batch.layout.one_hot):
        found[name] = batch.one_hot[:, i].contiguous().numpy()
    for column in schema.bags:
        bag = batch.bags[column.name]
        offsets = _array(bag.offsets.numpy().astype(np.int32))
        found[column.name] = pa.ListArray.from_arrays(offsets, _array(bag.values.numpy()))
        if column.weights is not None and bag.weights is not None:
            found[column.weights] = pa.ListArray.from_arrays(offsets, _array(bag.weights.numpy()))
    if schema.sample_weight is not None and batch.weight is not None:
        found[schema.sample_weight] = batch.weight.numpy()
    return found


def _array(values: NDArray[Any]) -> Any:
    return pa.array(values)


def _stack(columns: list[NDArray[Any]], size: int, dtype: type) -> NDArray[Any]:
    return np.stack(columns, 1).astype(dtype) if columns else np.zeros((size, 0), dtype)
