"""Rows in memory on their way to predictions."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, DataError, SchemaError, VivianeError
from viviane.core.locations import AnyPath, RemotePath
from viviane.core.rows import as_table
from viviane.data import Dataset, write_dataset
from viviane.data.conversion import table_of
from viviane.data.write import ROWS_PER_FILE
from viviane.model.module import GraphModule
from viviane.schema import CategoricalColumn, DenseColumn, Schema
from viviane.training import Trainer
from viviane.training.evaluation import evaluating, predict
from viviane.training.step.precision import Precision

ROWS_PER_BATCH: Final = 8192
_ROW_OF_FILE: Final = re.compile(r"/part-(\d+)\.parquet(?:, row group \d+)?(.*?)(?:, row (\d+))?", re.DOTALL)
"""A place in what `write_dataset` wrote: file, column, row of the file; a column's name may read like a row."""


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
    rows = opened(rows)
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


def as_batches(rows: Any, schema: Schema, etl: AnyPath | None, *, raw: bool | None) -> Iterator[Batch]:
    """Yield batches of rows that are in memory; labels and weights of the rows are left out.

    Args:
        rows: a Batch, or rows in a form of `viviane.core.rows.as_table`.
        etl: the fitted ETL, which raw rows go through first.
        raw: whether rows are as they were before the ETL; None finds out, see `is_raw`.

    Raises:
        ConfigError: raw rows and no ETL; rows of another kind, or that may be either.
        SchemaError: a column is missing or has nulls.
        DataError: a number is NaN, or beyond float32.
    """
    if isinstance(rows, Batch):
        yield rows
        return
    if not raw and isinstance(rows, Mapping) and not _has_text(rows):
        if raw is None and etl is not None and _lacks(rows, schema):
            raw = True
        else:
            given = {name: rows[name] for name in rows if name in schema.column_names}
            yield _finite(Batch.from_columns(schema, given))
            return
    table = as_table(rows)
    if is_raw(table, schema, etl) if raw is None else raw:
        table = clean(table, etl)
    for start in range(0, table.num_rows, ROWS_PER_BATCH):
        yield _finite(batch_of_table(table.slice(start, ROWS_PER_BATCH), schema, f"rows from {start} of a table"))


def _finite(batch: Batch) -> Batch:
    """Refuse numbers of which no prediction can be made, as the reader of a data set and sessions do."""
    wrong = ~torch.isfinite(batch.dense)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        names = [name for name, dim in batch.layout.dense for _ in range(dim)]
        raise DataError(
            "a number is not finite in float32", where=f"{batch.origin}, row {row}, column {names[place]!r}",
            value=batch.dense[row, place].item(), fix="clean the rows with the ETL (raw=True)",
        )  # fmt: skip
    return batch


def _has_text(columns: Mapping[str, Any]) -> bool:
    return any(
        isinstance(next(iter(values), None), str) for values in columns.values() if isinstance(values, list | tuple)
    )


def _features(schema: Schema) -> list[str]:
    return [one.name for one in schema.dense] + [one.name for one in schema.categorical]


def _lacks(columns: Mapping[str, Any], schema: Schema) -> bool:
    return any(name not in columns for name in _features(schema))


def is_raw(table: pa.Table, schema: Schema, etl: AnyPath | None) -> bool:
    """Whether a table's rows are as they were before the model's ETL, and not ids and numbers as the ETL writes them.

    They are raw where a column of the schema is missing, an id is text, has no value or is out of its range, or a dense
    number has no value. Without an ETL they are not.

    Raises:
        ConfigError: they could be either: all columns fit both the schema and the ETL's input.
    """
    if etl is None:
        return False
    for name in _features(schema):
        if name not in table.column_names:
            return True
        values: Any = table.column(name)
        kind = _inner(values.type)
        if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            return True
        column = schema.column(name)
        if isinstance(column, CategoricalColumn) and not _could_be_ids(values, kind, column):
            return True
    from viviane.etl import FittedEtl

    sources = FittedEtl.load(etl).config.feature_sources
    if any(name not in table.column_names for name in sources):
        return False
    ids = [table.column(column.name).type for column in schema.one_hot]
    if ids and all(
        pa.types.is_int32(kind) for kind in ids
    ):  # as the ETL writes them; whole numbers of files have 64 bits
        return False
    raise ConfigError(
        "the rows may be raw or encoded: all their columns fit both", value=", ".join(sources[:5]),
        fix="choose one: predict(rows, raw=True) or raw=False",
    )  # fmt: skip


def _inner(kind: Any) -> Any:
    """Return the type of a column's single values."""
    return getattr(kind, "value_type", kind)


def _could_be_ids(values: Any, kind: Any, column: CategoricalColumn) -> bool:
    if not pa.types.is_integer(kind):
        return False
    flat = pc.list_flatten(values) if pa.types.is_nested(values.type) else values
    if column.num_ids is None or not len(flat):
        return True
    ends: Any = pc.min_max(flat).as_py()
    return bool(ends["min"] is not None and ends["min"] >= 0 and ends["max"] < column.num_ids)


def clean(table: pa.Table, etl: AnyPath | None) -> pa.Table:
    """Turn raw rows into ids with a fitted ETL."""
    if etl is None:
        raise ConfigError(
            "the model has no ETL, so it cannot read raw rows",
            fix="train it on a data set that `viviane etl` wrote, or clean the rows first and leave raw out",
        )
    from viviane.etl import FittedEtl

    cleaned: pa.Table = FittedEtl.load(etl).transform_table(table)
    return cleaned


def is_path(rows: Any) -> bool:
    """Whether rows are given as the place of a data set."""
    return isinstance(rows, str | Path | RemotePath)


def opened(rows: Any) -> Any:
    """Return the data set that a path or URL names; other rows as they are."""
    return Dataset(rows) if is_path(rows) else rows


@contextmanager
def as_dataset(rows: Any, schema: Schema, etl: AnyPath | None) -> Iterator[Dataset]:
    """Hold rows with labels as a data set for a block: a data set as it is, other rows in a temporary folder.

    Args:
        rows: a Dataset or its folder, or rows in a form of `viviane.core.rows.as_table`, raw or encoded.
        schema: of the data set; columns that it does not name are left out.
        etl: the fitted ETL, which raw rows go through first.

    Raises:
        ConfigError: raw rows and no ETL. SchemaError: a column is missing, a label too. DataError: there are no rows.
    """
    rows = opened(rows)
    if isinstance(rows, Dataset):
        yield rows
        return
    if isinstance(rows, Batch):
        tables: list[pa.Table] = [table_of(rows, schema)]
    else:
        table = as_table(rows)
        table = clean(table, etl) if is_raw(table, schema, etl) else table
        missing = [name for name in schema.column_names if name not in table.column_names]
        if missing:
            fix = (
                "labels are needed to train and to evaluate"
                if {*missing} & {one.name for one in schema.labels}
                else None
            )
            raise SchemaError("a column is missing", value=", ".join(missing), fix=fix)
        if not table.num_rows:
            raise DataError("there are no rows", where=f"the given {type(rows).__name__}")
        tables = [table.select(schema.column_names)]
    with tempfile.TemporaryDirectory(prefix="viviane-rows-") as folder:
        place, name = Path(folder) / "rows", f"the given {type(rows).__name__}"
        try:
            data = write_dataset(place, schema, (dict(zip(t.column_names, t.columns, strict=True)) for t in tables))
        except VivianeError as error:
            _name_given_rows(error, "part 0 of the source", name)
            raise
        try:
            yield data
        except VivianeError as error:
            _name_given_rows(error, str(data.path), name)
            raise


def _name_given_rows(error: VivianeError, place: str, given: str) -> None:
    """Let an error name rows in memory by their place there.

    Args:
        place: how its `where` begins: the folder that holds them, or what was written there.
    """
    if error.where is None:
        return
    if not error.where.startswith(place):  # a batch of the folder: its name is random, so that no column has it
        error.move_to(error.where.replace(place, given))
        return
    rest = error.where.removeprefix(place)
    found = _ROW_OF_FILE.fullmatch(rest)
    if found is not None:
        file, column, row = found.groups()
        rest = column if row is None else f"{column}, row {int(file) * ROWS_PER_FILE + int(row)}"
    error.move_to(given + rest)


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
