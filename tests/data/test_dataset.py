from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_rows import SCHEMA, make_rows, rows_of, write_rows

from viviane.core.errors import ConfigError, DataError, KeyRangeError, SchemaError
from viviane.data import Dataset, write_dataset
from viviane.schema import Schema

SMALL = Schema.from_dict(
    {
        "labels": [{"name": "y"}],
        "dense": [{"name": "x"}, {"name": "v", "dim": 2}],
        "categorical": [
            {"name": "c", "num_ids": 10},
            {"name": "t", "num_ids": 10, "kind": "multi_hot", "max_length": 3, "weights": "w"},
        ],
        "sample_weight": "s",
    }
)
GOOD: dict[str, Any] = {
    "y": pa.array([0, 1, 1, 0, 1], pa.float32()),
    "x": pa.array([0, 1, 2, 3, 4], pa.float32()),
    "v": pa.array([[0, 1]] * 5, pa.list_(pa.float32(), 2)),
    "c": pa.array([3, 4, 5, 0, 9], pa.int32()),
    "t": pa.array([[3], [], [4, 5, 9], [], [0]], pa.list_(pa.int32())),
    "w": pa.array([[1], [], [1, 2, 3], [], [-1]], pa.list_(pa.float32())),
    "s": pa.array([1, 1, 0, 2, 1], pa.float32()),
}


def folder_with(tmp_path: Path, columns: dict[str, Any], rows_per_group: int = 3, schema: Schema = SMALL) -> Path:
    """Write Parquet with pyarrow alone, so that anything can stand in the file."""
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "part-00000.parquet", row_group_size=rows_per_group)
    schema.save(folder)
    return folder


def test_the_good_file_is_read(tmp_path: Path) -> None:
    data = Dataset(folder_with(tmp_path, GOOD))
    data.check()
    batch = data.head(5)
    assert batch.dense.tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1], [3, 0, 1], [4, 0, 1]]
    assert batch.bags["t"].weights is not None
    assert batch.bags["t"].weights.tolist() == [1, 1, 2, 3, -1]
    assert batch.weight is not None
    assert batch.weight.tolist() == [1, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("column", "values", "kind", "message"),
    [
        ("c", [3, 4, 5, 0, 10], KeyRangeError, r"column 'c', row 4\n  value:   10\n  allowed: 0 <= id < 10"),
        ("c", [3, -1, 5, 0, 9], KeyRangeError, r"row group 0, column 'c', row 1\n  value:   -1"),
        ("c", [3, 4, 5, None, 9], DataError, r"the data contain a null\n.*row group 1, column 'c', row 3"),
        ("t", [[3], [], [4, 5, 10], [], [0]], KeyRangeError, r"column 't', row 2\n  value:   10"),
        ("t", [[3], [], [4, 5, 9], [], [-7]], KeyRangeError, r"column 't', row 4\n  value:   -7"),
        ("t", [[3, 3, 3, 3], [], [1], [], [0]], DataError, r"too long\n.*row 0\n.*'4 ids'\n  allowed: at most 3"),
        ("t", [[3], None, [4, 5, 9], [], [0]], DataError, r"the data contain a null\n.*column 't', row 1"),
        ("t", [[3], [], [4, None, 9], [], [0]], DataError, r"a null inside a list\n.*column 't', row 2"),
        ("w", [[1], [], [1, 2], [], [1]], DataError, r"one weight per id of 't'\n.*'w', row 2\n.*3 ids, 2 weights"),
        ("w", [[1], [], [1, 2, 3], [], [np.inf]], DataError, r"not finite\n.*column 'w', row 4\n  value:   inf"),
        ("y", [0, 1, 0.5, 0, 1], DataError, r"neither 0 nor 1\n.*column 'y', row 2\n  value:   0.5\n  allowed: 0 or 1"),
        ("y", [0, 1, 0, np.nan, 1], DataError, r"neither 0 nor 1\n.*column 'y', row 3\n  value:   nan"),
        ("x", [0, 1, 2, np.nan, 1], DataError, r"not finite\n.*row group 1, column 'x', row 3\n  value:   nan"),
        ("x", [0, -np.inf, 2, 3, 1], DataError, r"not finite\n.*column 'x', row 1\n  value:   -inf"),
        ("v", [[0, 1]] * 4 + [[1, np.nan]], DataError, r"not finite\n.*column 'v', row 4\n  value:   nan"),
        ("s", [1, 1, -1, 1, 1], DataError, r"weight is negative\n.*column 's', row 2\n  value:   -1.0"),
        ("s", [1, 1, np.nan, 1, 1], DataError, r"not finite\n.*column 's', row 2"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(
    tmp_path: Path, column: str, values: list[Any], kind: type[Exception], message: str
) -> None:
    folder = folder_with(tmp_path, {**GOOD, column: pa.array(values, GOOD[column].type)})
    data = Dataset(folder)
    with pytest.raises(kind, match=message) as caught:
        list(data.reader(2, shuffle=True))
    assert f"{folder}/part-00000.parquet" in str(caught.value)
    with pytest.raises(kind, match=message):
        data.check()


def test_a_dense_vector_of_the_wrong_length(tmp_path: Path) -> None:
    vectors = pa.array([[0, 1], [0, 1], [0, 1], [0, 1, 2], [0]], pa.list_(pa.float32()))
    data = Dataset(folder_with(tmp_path, {**GOOD, "v": vectors}))
    with pytest.raises(DataError, match=r"wrong length\n.*column 'v', row 3\n  value:   3\n  allowed: 2"):
        data.check()


def test_large_finite_numbers_are_allowed(tmp_path: Path) -> None:
    big = pa.array([3e38, -3e38, 0, 1, 2], pa.float32())  # their difference overflows
    Dataset(folder_with(tmp_path, {**GOOD, "x": big})).check()


def test_other_kinds_of_list_and_labels_are_read(tmp_path: Path) -> None:
    schema = Schema.from_dict(
        {
            "labels": [{"name": "y", "dtype": "bool"}, {"name": "z", "dtype": "int8"}],
            "dense": [{"name": "v", "dim": 2}],
            "categorical": [{"name": "t", "num_ids": 10, "kind": "multi_hot"}],
        }
    )
    columns = {
        "y": pa.array([True, False, True]),
        "z": pa.array([0, 1, 1], pa.int8()),
        "v": pa.array([[0, 1], [2, 3], [4, 5]], pa.list_(pa.float32())),
        "t": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    }
    batch = Dataset(folder_with(tmp_path, columns, 2, schema)).head(3)
    assert batch.labels.tolist() == [[1, 0], [0, 1], [1, 1]]
    assert batch.dense.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch.bags["t"].values.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"c": pa.array([3, 4, 5, 0, 9], pa.int64())},
            r"the type of a column differs.*\n.*column 'c'\n  value:   'int64'\n.*int32",
        ),
        (
            {"x": pa.array([0, 1, 2, 3, 4], pa.float64())},
            r"the type of a column differs.*\n.*column 'x'\n  value:   'double'",
        ),
        ({"c": pa.array(list("abcde"))}, r"the type of a column differs.*\n.*column 'c'\n  value:   'string'"),
        (
            {"t": pa.array([1, 2, 3, 4, 5], pa.int32())},
            r"the type of a column differs.*\n.*column 't'\n  value:   'int32'",
        ),
        ({"v": pa.array([[0, 1, 2]] * 5, pa.list_(pa.float32(), 3))}, r"column 'v'\n.*'fixed_size_list.*\[3\]"),
        (
            {"colour": pa.array([1] * 5)},
            r"a column that is not in the schema\n.*part-00000.parquet\n  value:   'colour'.*\n.*`ignored`",
        ),
        ({"c": None}, r"is missing in the file\n.*part-00000.parquet\n  value:   'c'"),
    ],
)  # fmt: skip
def test_columns_that_are_not_the_schemas(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    columns = {name: values for name, values in {**GOOD, **change}.items() if values is not None}
    with pytest.raises(SchemaError, match=message):
        Dataset(folder_with(tmp_path, columns))


def test_a_column_that_stands_twice(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GOOD)
    twice = pa.Table.from_arrays([*GOOD.values(), GOOD["x"]], names=[*GOOD, "x"])
    pq.write_table(twice, folder / "part-00000.parquet")
    with pytest.raises(SchemaError, match="a column occurs twice"):
        Dataset(folder)


def test_an_ignored_column_is_passed_over(tmp_path: Path) -> None:
    schema = Schema.from_dict({**SMALL.to_dict(), "ignored": ["time", "absent"]})
    data = Dataset(folder_with(tmp_path, {**GOOD, "time": pa.array([1] * 5)}, schema=schema))
    assert data.head(5).one_hot[:, 0].tolist() == [3, 4, 5, 0, 9]


@pytest.mark.parametrize("keep", [-1, -200, 10, 0])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    folder = folder_with(tmp_path, GOOD)
    file = folder / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"not a complete Parquet file.*\n.*part-00000.parquet\n  value:   '\d+ bytes"):
        Dataset(folder)


def test_damaged_pages(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(50), rows_per_group=50, rows_per_file=50)
    content = bytearray(data.files[0].read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    data.files[0].write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be decoded.*\n.*part-00000.parquet, row group 0"):
        Dataset(data.path).check()


def test_an_absent_folder_an_empty_one_and_one_without_a_schema(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data set folder not found"):
        Dataset(tmp_path / "nowhere")
    SMALL.save(tmp_path)
    with pytest.raises(DataError, match="no Parquet files"):
        Dataset(tmp_path)
    (tmp_path / "schema.json").unlink()
    with pytest.raises(SchemaError, match="no schema here"):
        Dataset(tmp_path)


def test_hidden_files_and_other_files_are_passed_over(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(10))
    (data.path / ".part-9.parquet").write_bytes(b"half a copy")
    (data.path / "_metadata.parquet").write_bytes(b"")
    (data.path / "notes.txt").write_text("x")
    assert len(Dataset(data.path)) == 10


def test_head(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(10))
    assert rows_of(data.head(8)) == make_rows(10)[:8]
    assert len(data.head(99)) == 10
    with pytest.raises(ConfigError, match="at least one row"):
        data.head(0)
    empty = write_rows(tmp_path / "empty", [])
    assert (len(empty), len(empty.reader(4)), list(empty.reader(4, shuffle=True))) == (0, 0, [])
    with pytest.raises(DataError, match="the data set has no rows"):
        empty.head()


def test_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one", make_rows(40))
    same = write_rows(tmp_path / "two", make_rows(40))
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != write_rows(tmp_path / "more", make_rows(41)).fingerprint
    assert one.fingerprint != write_rows(tmp_path / "regrouped", make_rows(40), rows_per_group=8).fingerprint
    assert one.fingerprint != Dataset(one.path, SCHEMA.select(["row", "a"])).fingerprint


def test_info(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", SMALL, [pa.table(GOOD)], info={"source": "here"})
    assert data.info == {"rows": 5, "source": "here"}
    (data.path / "info.json").unlink()
    assert Dataset(data.path).info == {}


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(10))
    (data.path / "part-00009.parquet").mkdir()
    with pytest.raises(DataError, match=r"its manifest does not list\n.*part-00009.parquet"):
        Dataset(data.path)
    (data.path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"not a complete Parquet file.*\n.*part-00009.parquet"):
        Dataset(data.path)


def test_bags_have_as_many_ids_as_their_hotness(tmp_path: Path) -> None:
    content = SMALL.to_dict()
    content["categorical"][1] |= {"hotness": 2, "weights": None}
    content["ignored"] = ["w"]
    schema = Schema.from_dict(content)

    def read(bags: list[list[int]], name: str) -> int:
        (tmp_path / name).mkdir()
        columns = {**GOOD, "t": pa.array(bags, GOOD["t"].type)}
        return sum(batch.size for batch in Dataset(folder_with(tmp_path / name, columns, schema=schema)).reader(2))

    assert read([[3, 4]] * 5, "even") == 5
    with pytest.raises(
        DataError, match=r"hotness\n.*row group 0, column 't', row 2\n.*'1 ids'\n  allowed: 2 \(hotness"
    ):
        read([[3, 4], [5, 6], [7], [8, 9, 1], [3, 4]], "uneven")
