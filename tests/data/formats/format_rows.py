"""Schemas and rows for every format, and the rows of a data set as plain Python."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from viviane.data import Dataset
from viviane.data.conversion import table_of
from viviane.data.formats import (
    Format,
    HugectrParquetFormat,
    NormFormat,
    ParquetFormat,
    RawAsyncFormat,
    RawFormat,
    VivianeFormat,
)
from viviane.schema import Schema

ANY_BAGS: dict[str, Format] = {
    "parquet": ParquetFormat(),
    "viviane": VivianeFormat(),
    "viviane, columns": VivianeFormat(layout="columns"),
    "norm": NormFormat(i64_input_key=True),
    "norm, no check sums": NormFormat(check_sum=False, i64_input_key=True, shifted_keys=False),
    "hugectr-parquet": HugectrParquetFormat(i64_input_key=True),
    "hugectr-parquet, shifted": HugectrParquetFormat(i64_input_key=True, shifted_keys=True),
    "raw-async": RawAsyncFormat(i64_input_key=True, padding=0),
}
ONE_HOT: dict[str, Format] = {
    **ANY_BAGS,
    "raw": RawFormat(),
    "norm, keys of 4 bytes": NormFormat(),
    "raw-async, no padding": RawAsyncFormat(),
}
MIXED = Schema.from_dict(
    {
        "labels": [{"name": "click"}, {"name": "gekauft", "dtype": "int8"}],
        "dense": [{"name": "row"}, {"name": "vector", "dim": 3}],
        "categorical": [
            {"name": "größe", "num_ids": 256},
            {"name": "tags", "num_ids": 257, "kind": "multi_hot", "max_length": 4},
            {"name": "b", "num_ids": 70_000},
            {"name": "history", "num_ids": 50, "kind": "sequence", "max_length": 3},
        ],
    }
)


def rows_of(data: Dataset, **options: Any) -> dict[str, list[Any]]:
    """Return all rows by column, in the order of a reader."""
    found: dict[str, list[Any]] = {name: [] for name in data.schema.column_names}
    for batch in data.reader(5, **options):
        for name, values in table_of(batch, data.schema).to_pydict().items():
            found[name] += values
    return found


@st.composite
def schemas(draw: st.DrawFn, bags: bool) -> Schema:
    """Draw a schema: 1 to 3 labels, 0 to 3 dense columns, 1 to 5 categorical ones."""
    sizes = st.sampled_from([1, 2, 255, 256, 257, 65_536, 65_537, 2**31])
    wide = st.sampled_from([5, 2**31 + 1, 2**33])
    categorical = []
    for i in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["one_hot", "multi_hot", "sequence"])) if bags else "one_hot"
        dtype = draw(st.sampled_from(["int32", "int64"])) if bags else "int32"
        column = {"name": f"c{i} ümlaut", "kind": kind, "dtype": dtype}
        column["num_ids"] = draw(wide if dtype == "int64" else sizes if bags else st.integers(1, 2**29))
        if kind != "one_hot":
            column["max_length"] = draw(st.integers(1, 4))
        categorical.append(column)
    return Schema.from_dict(
        {
            "labels": [{"name": f"y{i}"} for i in range(draw(st.integers(1, 3)))],
            "dense": [{"name": f"x{i}", "dim": draw(st.integers(1, 3))} for i in range(draw(st.integers(0, 3)))],
            "categorical": categorical,
        }
    )


@st.composite
def rows_for(draw: st.DrawFn, schema: Schema) -> dict[str, list[Any]]:
    """Draw 0 to 12 rows; bags may be empty, and do not end with id 0, which pads them in one format."""
    count = draw(st.integers(0, 12))
    number = st.floats(-(2.0**60), 2.0**60, width=32)
    rows: dict[str, list[Any]] = {}
    for label in schema.labels:
        rows[label.name] = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=count, max_size=count))
    for dense in schema.dense:
        one = number if dense.dim == 1 else st.lists(number, min_size=dense.dim, max_size=dense.dim)
        rows[dense.name] = draw(st.lists(one, min_size=count, max_size=count))
    for column in schema.categorical:
        ids: Any = st.integers(0, column.num_ids - 1)
        if column.kind != "one_hot":
            ids = st.lists(ids, max_size=column.max_length).filter(lambda bag: not bag or bag[-1] != 0)
        rows[column.name] = draw(st.lists(ids, min_size=count, max_size=count))
    return rows
