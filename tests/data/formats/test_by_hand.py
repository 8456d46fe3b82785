"""Files laid out byte by byte, independently of our writers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_rows import rows_of

from viviane.core.errors import DataError
from viviane.data import Dataset, write_dataset
from viviane.data.formats import HugectrParquetFormat, NormFormat, RawAsyncFormat, RawFormat
from viviane.data.formats.key_set import key_set, read_key_set, write_key_set
from viviane.schema import Schema

SCHEMA = Schema.from_dict(
    {
        "labels": [{"name": "y"}],
        "dense": [{"name": "x"}, {"name": "v", "dim": 2}],
        "categorical": [
            {"name": "a", "num_ids": 10},
            {"name": "b", "num_ids": 20, "kind": "multi_hot", "max_length": 3},
            {"name": "c", "num_ids": 30},
        ],
    }
)
ROWS = {
    "y": [1.0, 0.0],
    "x": [0.5, -2.0],
    "v": [[1.0, 2.0], [3.0, 4.0]],
    "a": [9, 0],
    "b": [[19, 0, 7], []],
    "c": [29, 1],
}
ONE_HOT = SCHEMA.select(["y", "x", "v", "a", "c"])


def norm_file(checked: bool, wide: bool, shift: tuple[int, int, int] = (0, 10, 30)) -> bytes:
    def wrapped(payload: bytes) -> bytes:
        total = sum(byte - 256 if byte > 127 else byte for byte in payload)  # signed bytes
        return struct.pack("<i", len(payload)) + payload + struct.pack("<B", total & 0xFF) if checked else payload

    key = "q" if wide else "I"
    a, b, c = shift
    first = struct.pack(f"<4fi{key}", 1, 0.5, 1, 2, 1, 9 + a)
    first += struct.pack(f"<i3{key}i{key}", 3, 19 + b, 0 + b, 7 + b, 1, 29 + c)
    second = struct.pack(f"<4fi{key}ii{key}", 0, -2, 3, 4, 1, 0 + a, 0, 1, 1 + c)
    header = struct.pack("<8q", int(checked), 2, 1, 3, 3, 0, 0, 0)
    return wrapped(header) + wrapped(first) + wrapped(second)


def test_norm_of_hugectr_2_0(tmp_path: Path) -> None:
    content = struct.pack("<4q", 2, 1, 2, 0)  # rows, labels, slots
    content += struct.pack("<iiqi3q", 1, 1, 9, 3, 10 + 19, 10 + 0, 10 + 7)
    content += struct.pack("<iiqi", 0, 1, 0, 0)
    (tmp_path / "0.data").write_bytes(content)
    schema = SCHEMA.select(["y", "a", "b"])
    rows = {"y": ROWS["y"], "a": ROWS["a"], "b": ROWS["b"]}
    options = NormFormat(version="2.0")
    assert rows_of(Dataset(tmp_path / "0.data", schema, format=options)) == rows
    written = write_dataset(tmp_path / "again", schema, [rows], format=options)
    assert written.files[0].read_bytes() == content
    assert rows_of(written) == rows
    for length in range(len(content)):
        (tmp_path / "0.data").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"0\.data|no rows|file list"):
            rows_of(Dataset(tmp_path / "0.data", schema, format=options))
    with pytest.raises(DataError, match="no dense columns"):
        write_dataset(tmp_path / "dense", SCHEMA, [ROWS], format=options)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_norm(tmp_path: Path, checked: bool, wide: bool) -> None:
    content = norm_file(checked, wide)
    (tmp_path / "0.norm").write_bytes(content)
    (tmp_path / "list.txt").write_text("2\n0.norm\n0.norm\n")
    options = NormFormat(check_sum=checked, i64_input_key=wide)
    assert rows_of(Dataset(tmp_path / "0.norm", SCHEMA, options)) == ROWS
    twice = rows_of(Dataset(tmp_path / "list.txt", SCHEMA, options))
    assert twice == {name: values * 2 for name, values in ROWS.items()}
    ours = write_dataset(tmp_path / "set", SCHEMA, [ROWS], format=options)
    assert ours.files[0].read_bytes() == content
    assert (tmp_path / "set" / "file_list.txt").read_text() == f"1\n{tmp_path / 'set' / 'part-00000.norm'}\n"


def test_norm_keys_with_other_shifts(tmp_path: Path) -> None:
    (tmp_path / "0.norm").write_bytes(norm_file(True, False, (0, 0, 0)))
    assert rows_of(Dataset(tmp_path / "0.norm", SCHEMA, NormFormat(shifted_keys=False))) == ROWS
    (tmp_path / "0.norm").write_bytes(norm_file(True, False, (0, 100, 300)))
    sizes = (100, 200, 300)
    assert rows_of(Dataset(tmp_path / "0.norm", SCHEMA, NormFormat(slot_sizes=sizes))) == ROWS


def test_norm_columns_by_choice(tmp_path: Path) -> None:
    (tmp_path / "0.norm").write_bytes(norm_file(True, False))
    chosen = ["y", "v", "c"]
    data = Dataset(tmp_path / "0.norm", SCHEMA.select(chosen), "norm", stored=SCHEMA)
    assert rows_of(data) == {name: ROWS[name] for name in chosen}


def test_raw_of_real_numbers(tmp_path: Path) -> None:
    content = struct.pack("<4f2i", 1, 0.5, 1, 2, 9, 29) + struct.pack("<4f2i", 0, -2, 3, 4, 0, 1)
    (tmp_path / "train.bin").write_bytes(content)
    wanted = {name: values for name, values in ROWS.items() if name != "b"}
    assert rows_of(Dataset(tmp_path / "train.bin", ONE_HOT, RawFormat(num_samples=2))) == wanted
    assert rows_of(Dataset(tmp_path / "train.bin", ONE_HOT, "raw"), shuffle=True)["a"] in ([9, 0], [0, 9])
    ours = write_dataset(tmp_path / "set", ONE_HOT, [wanted], format="raw")
    assert ours.files[0].read_bytes() == content


def test_raw_of_whole_numbers(tmp_path: Path) -> None:
    content = struct.pack("<4i2i", 1, 0, 1, 2**30, 9, 29) + struct.pack("<4i2i", 0, 5, 1000, 7, 0, 1)
    (tmp_path / "train.bin").write_bytes(content)
    options = RawFormat(float_label_dense=False)
    found = rows_of(Dataset(tmp_path / "train.bin", ONE_HOT, options))
    assert found["y"] == [1, 0]
    # ln(k + 1), rounded to float32
    assert found["x"] == [0, float(np.float32(np.log(6)))]
    assert found["v"][1] == [float(np.float32(np.log(1001))), float(np.float32(np.log(8)))]
    ours = write_dataset(tmp_path / "set", ONE_HOT, [found], format=options)
    again = np.frombuffer(ours.files[0].read_bytes(), "<i4").reshape(2, 6)
    # the logarithm of 2^30, in 24 bits, is that of many counts near it
    assert again[0, 3] == pytest.approx(2**30, rel=2e-6)
    assert np.delete(again.reshape(-1), 3).tolist() == [1, 0, 1, 9, 29, 0, 5, 1000, 7, 0, 1]


@pytest.mark.parametrize("wide", [False, True])
def test_raw_async(tmp_path: Path, wide: bool) -> None:
    key = "q" if wide else "i"
    rows = {**ROWS, "b": [[19, 0, 7], [1, 1, 1]]}
    content = struct.pack(f"<i3f5{key}", 1, 0.5, 1, 2, 9, 19, 0, 7, 29) + struct.pack(
        f"<i3f5{key}", 0, -2, 3, 4, 0, 1, 1, 1, 1
    )
    (tmp_path / "train.bin").write_bytes(content)
    options = RawAsyncFormat(i64_input_key=wide, num_samples=2)
    assert rows_of(Dataset(tmp_path / "train.bin", SCHEMA, options)) == rows
    assert write_dataset(tmp_path / "set", SCHEMA, [rows], format=options).files[0].read_bytes() == content
    counts = struct.pack(f"<4i5{key}", 1, 0, 5, 1000, 9, 19, 0, 7, 29)
    (tmp_path / "whole.bin").write_bytes(counts)
    whole = RawAsyncFormat(i64_input_key=wide, is_dense_float=False)
    assert rows_of(Dataset(tmp_path / "whole.bin", SCHEMA, whole))["v"] == [
        [float(np.float32(np.log(6))), float(np.float32(np.log(1001)))]
    ]


@pytest.mark.parametrize("key", [pa.int32(), pa.uint32(), pa.int64(), pa.uint64()])
def test_hugectr_parquet(tmp_path: Path, key: pa.DataType) -> None:
    columns = {
        "other": pa.array(["not", "read"]),
        "a": pa.array(ROWS["a"], key),
        "b": pa.array(ROWS["b"], pa.list_(key)),
        "y": pa.array([1, 0], pa.int64()),
        "x": pa.array(ROWS["x"], pa.float32()),
        "v": pa.array(ROWS["v"], pa.list_(pa.float32())),
        "c": pa.array(ROWS["c"], key),
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    pq.write_table(pa.table(columns).slice(1), tmp_path / "1.parquet")
    metadata = {
        "file_stats": [
            {"file_name": "1.parquet", "num_rows": 1},
            {"file_name": "/elsewhere/0.parquet", "num_rows": 2},
        ],
        "labels": [{"col_name": "y", "index": 3}],
        "conts": [{"col_name": "x", "index": 4}, {"col_name": "v", "index": 5}],
        "cats": [{"col_name": "a", "index": 1}, {"col_name": "b", "index": 2}, {"col_name": "c", "index": 6}],
    }
    (tmp_path / "_metadata.json").write_text(json.dumps(metadata))
    (tmp_path / "_file_list.txt").write_text("2\n0.parquet\n1.parquet\n")
    wanted = {name: [*values, values[1]] for name, values in ROWS.items()}
    assert rows_of(Dataset(tmp_path / "_file_list.txt", SCHEMA)) == wanted
    SCHEMA.save(tmp_path)
    assert rows_of(Dataset(tmp_path))["a"] == [0, 9, 0]  # in the order of the metadata


def test_hugectr_parquet_as_written(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", SCHEMA, [ROWS], format=HugectrParquetFormat(), rows_per_group=1, rows_per_file=1)
    metadata = json.loads((tmp_path / "set" / "_metadata.json").read_text())
    assert metadata == {
        "file_stats": [{"file_name": f"part-0000{i}.parquet", "num_rows": 1} for i in range(2)],
        "labels": [{"col_name": "y", "index": 0}],
        "conts": [{"col_name": "x", "index": 1}, {"col_name": "v", "index": 2}],
        "cats": [{"col_name": "a", "index": 3}, {"col_name": "b", "index": 4}, {"col_name": "c", "index": 5}],
    }
    types = pq.read_schema(tmp_path / "set" / "part-00000.parquet")
    assert [str(types.field(i).type).replace("item", "element") for i in range(6)] == [
        "float", "float", "list<element: float>", "int32", "list<element: int32>", "int32",
    ]  # fmt: skip
    assert (tmp_path / "set" / "file_list.txt").read_text().splitlines()[0] == "2"


@pytest.mark.parametrize("wide", [False, True])
def test_key_sets(tmp_path: Path, wide: bool) -> None:
    data = write_dataset(tmp_path / "set", SCHEMA, [ROWS, ROWS])
    keys = [0, 9, 10, 17, 29, 31, 59]  # a: 0, 9 | b: 10 + 0, 7, 19 | c: 30 + 1, 29
    assert key_set(data).tolist() == keys
    assert write_key_set(tmp_path / "keys", data, i64_input_key=wide) == 7
    assert (tmp_path / "keys").read_bytes() == struct.pack("<7q" if wide else "<7I", *keys)
    (tmp_path / "keys").write_bytes(struct.pack("<3q" if wide else "<3I", 5, 2, 5))  # neither sorted nor unique
    assert read_key_set(tmp_path / "keys", i64_input_key=wide).tolist() == [2, 5]
    assert key_set(data, shifted_keys=False).tolist() == [0, 1, 7, 9, 19, 29]
