"""Rows in memory on their way to predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, SchemaError
from viviane.core.locations import AnyPath
from viviane.data import Dataset
from viviane.model.module import GraphModule
from viviane.schema import CategoricalColumn, DenseColumn, Schema
from viviane.training import Trainer
from viviane.training.evaluation import evaluating, predict
from viviane.training.precision import Precision

ROWS_PER_BATCH: Final = 8192


def predict_rows(trainer: Trainer, batches: Iterable[Batch]) -> Iterator[NDArray[np.float32]]:
    """Yield a trained module's predictions, (B, L), batch by batch."""
    precision = trainer.precision or Precision("fp32")
    for batch in batches:
        with trainer.averaged():
            scores = predict(trainer.module, [batch], batch.size, trainer.objective, precision, trainer.device)
        yield scores


def tensor_rows(trainer: Trainer, module: GraphModule, name: str, rows: Any, schema: Schema) -> NDArray[np.float32]:
    """Return a tensor of a graph for rows that have the columns which it depends on, (rows, ...), in their order."""
    needed = module.columns_of(name)
    if isinstance(rows, Dataset):
        trainer.check_schema(rows, with_labels=False)
        with rows.reader(trainer.eval_batch_size()) as reader:
            return _tensors(trainer, module, name, reader)
    return _tensors(trainer, module, name, as_batches(rows, schema.select(needed), None, raw=False))


def _tensors(trainer: Trainer, module: GraphModule, name: str, batches: Iterable[Batch]) -> NDArray[np.float32]:
    precision = trainer.precision or Precision("fp32")
    parts = []
    with trainer.averaged(), evaluating(module):
        for batch in batches:
            with precision.context(trainer.device):
                parts.append(module.tensor(name, batch.to(trainer.device)).float().cpu().numpy())
    return np.concatenate(parts)


def as_batches(rows: Any, schema: Schema, etl: AnyPath | None, *, raw: bool) -> Iterator[Batch]:
    """Yield batches of rows that are in memory; labels and weights of the rows are left out.

    Args:
        rows: a Batch, columns by name, an Arrow table, or a pandas frame.
        etl: the fitted ETL, which raw rows go through first.
        raw: rows are as they were before the ETL: a table or a frame.

    Raises:
        ConfigError: raw rows and no ETL; rows of another kind.
        SchemaError: a column is missing or has nulls.
    """
    if raw:
        rows = clean(_as_table(rows, "raw rows are an Arrow table or a pandas frame"), etl)
    if isinstance(rows, Batch):
        yield rows
    elif isinstance(rows, Mapping):
        yield Batch.from_columns(schema, rows)
    else:
        table = _as_table(rows, "rows are a Dataset, a Batch, columns by name, an Arrow table or a pandas frame")
        for start in range(0, table.num_rows, ROWS_PER_BATCH):
            yield batch_of_table(table.slice(start, ROWS_PER_BATCH), schema, f"rows from {start} of a table")


def clean(table: pa.Table, etl: AnyPath | None) -> pa.Table:
    """Turn raw rows into ids with a fitted ETL."""
    if etl is None:
        raise ConfigError(
            "the model knows no ETL, so it cannot read raw rows",
            fix="train it on a data set that `viviane etl` wrote, or clean the rows first and leave raw out",
        )
    from viviane.etl import FittedEtl

    cleaned: pa.Table = FittedEtl.load(etl).transform_table(table)
    return cleaned


def _as_table(rows: Any, wanted: str) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if type(rows).__name__ == "DataFrame" and type(rows).__module__.startswith("pandas"):
        table = pa.Table.from_pandas(rows, preserve_index=False)
        # pandas 3 gives text with 64-bit offsets, for columns beyond 2 GiB; the ETL reads text with 32-bit ones
        fields = [f.with_type(pa.string()) if pa.types.is_large_string(f.type) else f for f in table.schema]
        return table.cast(pa.schema(fields))
    raise ConfigError(wanted, value=type(rows).__name__)


def batch_of_table(table: pa.Table, schema: Schema, origin: str) -> Batch:
    """Return rows of an Arrow table as a batch without labels.

    Raises:
        SchemaError: a column is missing or has nulls.
    """
    columns: dict[str, Any] = {}

    def take(name: str) -> Any:
        if name not in table.column_names:
            raise SchemaError("a column is missing", where=origin, value=name)
        values = table.column(name)
        if values.null_count:
            fix = "clean the rows with the ETL (raw=True)"
            raise SchemaError("a column has nulls", where=f"{origin}, column {name!r}", fix=fix)
        return values

    for dense in schema.dense:
        values = take(dense.name)
        nested = pa.types.is_nested(values.type)
        columns[dense.name] = _vectors(values, dense, origin) if nested else values.to_numpy()
    for column in schema.categorical:
        values = take(column.name)
        if pa.types.is_nested(values.type):
            columns[column.name] = _bag(
                values, None if column.weights is None else take(column.weights), column, origin
            )
        else:
            columns[column.name] = values.to_numpy()
    return Batch.from_columns(schema, columns, origin)


def _vectors(values: Any, column: DenseColumn, origin: str) -> NDArray[Any]:
    """Return lists of `dim` numbers each, (rows, dim)."""
    flat = pc.list_flatten(values)
    lengths = pc.list_value_length(values).to_numpy()
    if flat.null_count or (lengths != column.dim).any():
        raise SchemaError(f"a row has not {column.dim} numbers", where=f"{origin}, column {column.name!r}")
    numbers: NDArray[Any] = flat.to_numpy().reshape(-1, column.dim)
    return numbers


def _bag(lists: Any, weights: Any, column: CategoricalColumn, origin: str) -> Bag:
    """Return lists of ids as a bag, without going through Python lists."""
    where = f"{origin}, column {column.name!r}"
    flat = pc.list_flatten(lists)
    if flat.null_count:
        raise SchemaError("a list of ids has nulls", where=where, fix="clean the rows with the ETL (raw=True)")
    if not (pa.types.is_integer(flat.type) or pa.types.is_null(flat.type)):
        raise SchemaError("ids must be whole numbers", where=where, value=str(flat.type))
    try:
        ids = flat.cast(pa.int32() if column.dtype == "int32" else pa.int64())
    except pa.ArrowInvalid as error:
        raise SchemaError(f"an id does not fit {column.dtype}", where=where, value=str(error)) from error
    lengths = pc.list_value_length(lists).to_numpy()
    numbers = None
    if weights is not None:
        own = pc.list_flatten(weights)
        if own.null_count or not np.array_equal(pc.list_value_length(weights).to_numpy(), lengths):
            raise SchemaError("a bag needs one weight per id", where=f"{where}, weights {column.weights!r}")
        numbers = torch.from_numpy(own.cast(pa.float32(), safe=False).to_numpy().copy())
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    return Bag(torch.from_numpy(ids.to_numpy().copy()), offsets, numbers)
