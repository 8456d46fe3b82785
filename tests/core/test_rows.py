"""Rows of every form become the same table."""

import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.core.rows import as_table, is_frame

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {"a": 3, "b": "z"}]
WANTED = {"a": [1, 2, 3], "b": ["x", None, "z"]}


class Indexed(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return ROWS[place]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ROWS


class Capsule:
    """What has Arrow's PyCapsule interface, as Hugging Face data sets and DuckDB's results do."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pa.Table.from_pylist(ROWS).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        {"a": np.array([1, 2, 3]), "b": ["x", None, "z"]},
        {"a": torch.tensor([1, 2, 3]), "b": pa.array(["x", None, "z"])},
        pd.DataFrame(ROWS, index=[7, 8, 9]),
        pd.DataFrame(ROWS).astype({"b": "category"}),
        pl.DataFrame(ROWS),
        pl.DataFrame(ROWS).lazy(),
        pa.Table.from_pylist(ROWS),
        pa.RecordBatch.from_pylist(ROWS),
        pa.Table.from_pylist(ROWS).to_reader(),
        [pa.RecordBatch.from_pylist(ROWS[:1]), pa.RecordBatch.from_pylist(ROWS[1:])],
        Capsule(),
        Indexed(),
        Stream(),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_every_form_gives_the_same_rows(rows: Any) -> None:
    assert as_table(rows).to_pydict() == WANTED


def test_a_data_loader_gives_its_batches_in_order() -> None:
    loader = torch.utils.data.DataLoader([{"a": float(n)} for n in range(5)], batch_size=2)
    assert as_table(loader).to_pydict() == {"a": [0.0, 1.0, 2.0, 3.0, 4.0]}


def test_arrays_have_numbered_columns_or_the_given_names() -> None:
    assert as_table(np.arange(4).reshape(2, 2)).to_pydict() == {"x0": [0, 2], "x1": [1, 3]}
    assert as_table(torch.arange(2).reshape(2, 1), ["n"]).to_pydict() == {"n": [0, 1]}
    assert as_table([[1, 2], [3, 4]]).to_pydict() == {"x0": [1, 3], "x1": [2, 4]}
    records = np.array([(1, "a")], dtype=[("n", int), ("t", "U1")])
    assert as_table(records).to_pydict() == {"n": [1], "t": ["a"]}


def test_columns_that_only_later_rows_have_are_missing_before() -> None:
    assert as_table([{"a": 1}, {"b": 2}]).to_pydict() == {"a": [1, None], "b": [None, 2]}


def test_types_that_only_the_producer_needs_are_made_plain() -> None:
    table = pa.table({
        "text": pa.array(["a"], pa.large_string()), "flag": pa.array([True]),
        "lists": pa.array([[1]], pa.large_list(pa.int8())),
        "money": pa.array([1], pa.decimal128(5, 2)), "when": pa.array([datetime.datetime(2024, 1, 1)]),
    })  # fmt: skip
    assert [str(kind) for kind in as_table(table).schema.types] == [
        "string", "int8", "list<item: int8>", "double", "timestamp[us]",
    ]  # fmt: skip


def test_mixed_values_become_text_as_a_file_would_hold_them() -> None:
    assert as_table(pd.DataFrame({"a": [1, "x", None, 2.5]})).to_pydict() == {"a": ["1", "x", None, "2.5"]}
    with pytest.raises(DataError, match="incompatible types"):
        as_table({"a": [1, {"b": 2}, "x"]})


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (5, ConfigError, "not supported"),
        ("clicks.csv", ConfigError, "read the file first"),
        ([], DataError, "no rows"),
        ({"a": [1], "b": [1, 2]}, SchemaError, "differ in length"),
        ({"a": 5}, SchemaError, "array or list"),
        ([{"a": 1}, 5], DataError, "row 1"),
        (np.zeros(3), DataError, "two dimensions"),
        ([1, 2], ConfigError, "no named columns"),
        (pd.Series([1]), ConfigError, "to_frame"),
        (pa.table([[1], [2]], names=["a", "a"]), SchemaError, "twice"),
        ([[1, 2], [3]], DataError, "differ in length"),
    ],
)
def test_refuses_what_is_no_rows(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_table(rows)


def test_says_whether_rows_have_names() -> None:
    assert [is_frame(one) for one in (ROWS, pl.DataFrame(ROWS), np.zeros((2, 2)), [[1]])] == [True, True, False, False]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1) | st.none(), st.text(max_size=5) | st.none()), min_size=1))
def test_dicts_columns_and_frames_agree(rows: list[tuple[int | None, str | None]]) -> None:
    dicts = [{"n": n, "t": t} for n, t in rows]
    columns = {"n": [n for n, _ in rows], "t": [t for _, t in rows]}
    assert as_table(dicts).to_pydict() == as_table(columns).to_pydict() == columns


def test_sparse_matrices_are_refused() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    for kind in ("csr_matrix", "csc_array", "coo_array", "lil_matrix", "dok_array", "dok_matrix"):
        matrix = getattr(sparse, kind)(np.eye(3))
        with pytest.raises(ConfigError, match="a sparse matrix is not supported"):
            as_table(matrix, ["a", "b", "c"])


def test_objects_that_give_an_array_are_taken() -> None:
    class Wrapped:
        def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
            return np.arange(4.0).reshape(2, 2)

    assert as_table(Wrapped(), ["a", "b"]).to_pydict() == {"a": [0.0, 2.0], "b": [1.0, 3.0]}
