"""Conversion between formats: the same rows in the same order, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch

from viviane.batch import Bag, Batch
from viviane.core.locations import AnyPath
from viviane.data.columns import arrow_types
from viviane.data.dataset import Dataset
from viviane.data.formats import Format
from viviane.data.write import ROWS_PER_FILE, ROWS_PER_GROUP, write_dataset
from viviane.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema


def convert(
    source: Dataset,
    path: str | AnyPath,
    format: str | Format,  # noqa: A002 - the word on the command line
    *,
    rows_per_group: int = ROWS_PER_GROUP,
    rows_per_file: int = ROWS_PER_FILE,
    num_threads: int = 2,
    overwrite: bool = False,
) -> Dataset:
    """Write the rows of a data set in another format, atomically, and open the new folder.

    Args:
        source: a data set in any format; the columns of its schema are written.
        path: the new folder.
        format: name of a format of `viviane.data.formats`, or a format with its options.
        rows_per_group, rows_per_file, overwrite: see `write_dataset`.
        num_threads: number of reader threads.

    Raises:
        ConfigError: the folder exists.
        SchemaError: the format cannot store a column; names it.
        DataError, KeyRangeError: a row of the source is damaged, or the format cannot store it.

    Example:
        >>> from pathlib import Path
        >>> import tempfile
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> folder = Path(tempfile.mkdtemp())
        >>> data = write_dataset(folder / "parquet", schema, [{"y": [0.0, 1.0], "c": [3, 8]}])
        >>> convert(data, folder / "fast", "viviane").head().one_hot.tolist()
        [[3], [8]]
    """

    def tables() -> Iterator[pa.Table]:
        with source.reader(min(rows_per_group, ROWS_PER_GROUP), num_threads=num_threads) as reader:
            for batch in reader:
                yield table_of(batch, source.schema)

    info = {name: value for name, value in source.info.items() if name != "rows"}
    return write_dataset(
        path,
        source.schema,
        tables(),
        format=format,
        rows_per_group=rows_per_group,
        rows_per_file=rows_per_file,
        info=info,
        overwrite=overwrite,
    )


def table_of(batch: Batch, schema: Schema) -> pa.Table:
    """Return a batch as an Arrow table with the schema's types: the inverse of reading.

    Example:
        >>> schema = Schema(dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9, "kind": "multi_hot"}])
        >>> batch = Batch.from_columns(schema, {"x": [0.5, 1.5], "c": [[3, 4], []]})
        >>> table_of(batch, schema).to_pydict()
        {'x': [0.5, 1.5], 'c': [[3, 4], []]}
    """
    types = arrow_types(schema)
    arrays = [_array(batch, column, types[column.name]) for column in schema.columns]
    for column in schema.bags:
        if column.weights is not None:
            bag = batch.bags[column.name]
            assert bag.weights is not None
            arrays.append(_lists(Bag(bag.weights, bag.offsets), types[column.weights]))
    if schema.sample_weight is not None:
        assert batch.weight is not None
        arrays.append(pa.array(batch.weight.numpy()))
    return pa.table(arrays, names=list(types))


def _array(batch: Batch, column: LabelColumn | DenseColumn | CategoricalColumn, kind: Any) -> Any:
    if isinstance(column, LabelColumn):
        label: Any = pa.array(batch.label(column.name).contiguous().numpy())
        return label.cast(kind)
    if isinstance(column, DenseColumn):
        values = pa.array(batch.dense_feature(column.name).reshape(-1).numpy())
        return values if column.dim == 1 else pa.FixedSizeListArray.from_arrays(values, column.dim)
    if column.kind != "one_hot":
        return _lists(batch.bags[column.name], kind)
    ids: Any = pa.array(batch.one_hot[:, batch.layout.one_hot_index[column.name]].contiguous().numpy())
    return ids.cast(kind)


def _lists(bag: Bag, kind: Any) -> Any:
    offsets: Any = pa.array(bag.offsets.to(torch.int32).numpy())
    values: Any = pa.array(bag.values.numpy())
    return pa.ListArray.from_arrays(offsets, values.cast(kind.value_type))
