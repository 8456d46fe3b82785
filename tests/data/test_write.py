from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_rows import SCHEMA, columns_of, make_rows, rows_of, write_rows

from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.data import write_dataset
from viviane.schema import Schema

NARROW = Schema.from_dict({"dense": [{"name": "x"}], "categorical": [{"name": "c", "num_ids": 10}]})


def test_row_groups_and_files_have_the_sizes_asked_for(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(50), rows_per_group=7, rows_per_file=21)
    assert [file.name for file in data.files] == [f"part-{i:05}.parquet" for i in range(3)]
    groups = [[group.num_rows for group in data.groups if group.file == i] for i in range(3)]
    assert groups == [[7, 7, 7], [7, 7, 7], [7, 1]]


def test_parts_of_any_size_give_the_same_files(tmp_path: Path) -> None:
    rows = make_rows(50)
    parts = [rows[:1], [], rows[1:2], rows[2:30], rows[30:]]
    one = write_rows(tmp_path / "one", rows)
    other = write_dataset(
        tmp_path / "two", SCHEMA, [columns_of(part) for part in parts], rows_per_group=7, rows_per_file=21
    )
    assert one.fingerprint == other.fingerprint
    assert [file.read_bytes() for file in one.files] == [file.read_bytes() for file in other.files]
    assert rows_of(other.head(50)) == rows


def test_tables_batches_and_arrays_are_accepted(tmp_path: Path) -> None:
    table = pa.table({"c": pa.array([1], pa.int32()), "x": pa.array([1], pa.float32())})
    arrays = {"x": np.array([2.5]), "c": np.array([2], np.int64)}
    sources = [table, table.to_batches()[0], arrays, {"x": [3], "c": [3]}]
    batch = write_dataset(tmp_path / "set", NARROW, sources).head(9)
    assert batch.dense[:, 0].tolist() == [1, 1, 2.5, 3]
    assert batch.one_hot[:, 0].tolist() == [1, 1, 2, 3]


def test_matrices_become_vectors_and_bags(tmp_path: Path) -> None:
    schema = Schema.from_dict(
        {"dense": [{"name": "v", "dim": 2}], "categorical": [{"name": "t", "num_ids": 9, "kind": "multi_hot"}]}
    )
    data = write_dataset(tmp_path / "set", schema, [{"v": np.arange(6.0).reshape(3, 2), "t": np.ones((3, 4), int)}])
    batch = data.head(3)
    assert batch.dense.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch.bags["t"].lengths.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ({"x": [1.0]}, SchemaError, "unknown: none; missing: c"),
        ({"x": [1.0], "c": [1], "z": [1]}, SchemaError, "unknown: z; missing: none"),
        ({"x": [1.0, 2.0], "c": [1]}, SchemaError, "columns differ in length"),
        ({"x": [1.0], "c": np.array([1.5])}, DataError, r"without loss\n.*part 0 of the source, column 'c'"),
        ({"x": [1.0], "c": np.array([2**31])}, DataError, r"without loss\n.*column 'c'"),
        ({"x": ["one"], "c": [1]}, DataError, r"without loss\n.*column 'x'"),
        ({"x": [None], "c": [1]}, DataError, r"the data contain a null\n.*column 'x'"),
        ({"x": np.zeros((1, 1)), "c": [1]}, DataError, r"without loss\n.*column 'x'"),
        (
            pa.table({"x": pa.array([1.0]), "c": pa.array([1], pa.int32())}),
            SchemaError,
            r"the type of a column differs.*\n.*'x'",
        ),
        ([1, 2], SchemaError, r"Arrow tables or dicts of columns\n.*\n  value:   'list'"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused(
    tmp_path: Path, part: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        write_dataset(tmp_path / "set", NARROW, [part])
    assert list(tmp_path.iterdir()) == []


def test_a_failing_source_leaves_the_old_data_set(tmp_path: Path) -> None:
    old = write_dataset(tmp_path / "set", NARROW, [{"x": [1], "c": [1]}])

    def source() -> Iterator[dict[str, list[int]]]:
        yield {"x": [1] * 100, "c": [1] * 100}
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write_dataset(tmp_path / "set", NARROW, source(), rows_per_group=10, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    old.check()
    assert len(old.head(9)) == 1


def test_an_existing_folder_is_not_replaced_unasked(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", NARROW, [])
    with pytest.raises(ConfigError, match="the folder exists"):
        write_dataset(tmp_path / "set", NARROW, [])
    assert len(write_dataset(tmp_path / "set", NARROW, [{"x": [1], "c": [1]}], overwrite=True)) == 1


@pytest.mark.parametrize("sizes", [{"rows_per_group": 0}, {"rows_per_file": 0}])
def test_sizes_below_one(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        write_dataset(tmp_path / "set", NARROW, [], **sizes)


def test_no_rows_still_keep_the_types(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", SCHEMA, [])
    assert pq.read_schema(data.files[0]).names == SCHEMA.column_names
    assert data.info == {"rows": 0}


LISTS = Schema.from_dict(
    {"categorical": [{"name": "c", "num_ids": 10}, {"name": "t", "num_ids": 9, "kind": "multi_hot"}]}
)
FRACTIONS: list[Any] = [3.9, np.float64(3.9), np.float32(3.9), Decimal("3.9"), float("nan"), 1e300]
SHAPES: dict[str, Any] = {
    "list": lambda value: {"c": [3, value], "t": [[1], [2]]},
    "objects": lambda value: {"c": np.array([3, value], object), "t": [[1], [2]]},
    "bag": lambda value: {"c": [1, 2], "t": [[3], [1, value]]},
    "bag of an array": lambda value: {"c": [1, 2], "t": [[3], np.array([value])]},
    "arrow": lambda value: {"c": pa.array([value, value]), "t": [[1], [2]]},
    "arrow bag": lambda value: {"c": [1, 2], "t": pa.array([[], [value]])},
    "chunks": lambda value: {"c": [1, 2], "t": pa.chunked_array([[[value]], [[value]]])},
}
CASES = [(shape, value) for shape in SHAPES for value in FRACTIONS]
CASES += [(shape, value) for shape in ("list", "objects", "bag") for value in (True, "3", 10**5000)]


@pytest.mark.parametrize(("shape", "value"), CASES, ids=range(len(CASES)))
def test_ids_that_are_no_whole_numbers_are_refused(tmp_path: Path, shape: str, value: Any) -> None:
    """A list with 3.9 was written as 3."""
    with pytest.raises(DataError, match="without loss"):
        write_dataset(tmp_path / "set", LISTS, [SHAPES[shape](value)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whole", [3.0, np.float64(3), Decimal("3"), np.int8(3), np.uint64(3)])
def test_ids_that_are_whole_are_kept(tmp_path: Path, whole: Any) -> None:
    data = write_dataset(tmp_path / "set", LISTS, [{"c": [whole], "t": [[whole, 1]]}])
    assert data.head(1).one_hot.tolist() == [[3]]
    assert data.head(1).bags["t"].values.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("dim", "values"),
    [(1, [1e300]), (1, np.array([1e300])), (1, pa.array([1e300])), (2, np.array([[1.0, -1e39]])), (2, [[0.0, 1e39]])],
)
def test_numbers_beyond_float32_are_refused(tmp_path: Path, dim: int, values: Any) -> None:
    schema = Schema.from_dict({"dense": [{"name": "x", "dim": dim}]})
    with pytest.raises(DataError, match=r"without loss[\s\S]*does not fit float32"):
        write_dataset(tmp_path / "set", schema, [{"x": values}])


def test_a_null_inside_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the data contain a null\n.*column 't', row 2"):
        write_dataset(tmp_path / "set", LISTS, [{"c": [1, 1, 1], "t": [[3], [], [4, None]]}])
