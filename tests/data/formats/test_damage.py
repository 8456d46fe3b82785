"""Files that are cut, changed or contradict each other give an error that says where; nothing is lost silently."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from format_rows import ANY_BAGS, MIXED, rows_of

from viviane.core.errors import ConfigError, DataError, KeyRangeError, SchemaError, VivianeError
from viviane.data import Dataset, write_dataset
from viviane.data.formats import NormFormat, RawAsyncFormat, RawFormat, VivianeFormat
from viviane.data.formats.key_set import read_key_set
from viviane.schema import Schema

ROWS = {
    "click": [1.0, 0.0, 1.0],
    "gekauft": [0.0, 0.0, 1.0],
    "row": [0.0, 1.0, 2.0],
    "vector": [[1.0, 2.0, 3.0]] * 3,
    "größe": [255, 0, 7],
    "tags": [[256, 1], [], [3]],
    "b": [69_999, 1, 2],
    "history": [[], [49, 48, 47], [1]],
}
ONE_HOT = Schema.from_dict({"labels": [{"name": "y"}], "categorical": [{"name": "c", "num_ids": 300}]})
FEW = {"y": [1.0, 0.0, 1.0], "c": [299, 1, 2]}
ALONE = {
    "norm, check sums": NormFormat(),
    "norm": NormFormat(check_sum=False),
    "raw": RawFormat(num_samples=3),
    "raw-async": RawAsyncFormat(num_samples=3),
}


@pytest.mark.parametrize("name", [name for name in ANY_BAGS if name != "parquet"])
def test_cut_anywhere_every_file_is_refused(tmp_path: Path, name: str) -> None:
    written = write_dataset(tmp_path / "set", MIXED, [ROWS], format=ANY_BAGS[name], rows_per_group=2)
    assert rows_of(written) == ROWS
    for path in (*written.files, tmp_path / "set" / "manifest.json", tmp_path / "set" / "schema.json"):
        whole = path.read_bytes()
        step = 1 if path.suffix in (".norm", ".rows", ".bin") else len(whole) // 40
        for length in range(0, len(whole) - 1, step):  # JSON ends with a newline
            path.write_bytes(whole[:length])
            with pytest.raises(VivianeError) as caught:
                rows_of(Dataset(tmp_path / "set"))
            assert str(tmp_path) in str(caught.value)
        if path.name != "manifest.json" or name[:7] != "hugectr":  # its own metadata says enough
            path.unlink()
            with pytest.raises(VivianeError):
                rows_of(Dataset(tmp_path / "set"))
        path.write_bytes(whole)
    assert rows_of(Dataset(tmp_path / "set")) == ROWS


@pytest.mark.parametrize("name", ALONE)
def test_cut_anywhere_without_a_manifest(tmp_path: Path, name: str) -> None:
    schema, rows = (MIXED, ROWS) if name.startswith("norm") else (ONE_HOT, FEW)
    whole = write_dataset(tmp_path / "set", schema, [rows], format=ALONE[name]).files[0].read_bytes()
    file = tmp_path / "file"
    file.write_bytes(whole)
    assert rows_of(Dataset(file, schema, ALONE[name])) == rows
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match=str(file)):
            rows_of(Dataset(file, schema, ALONE[name]))
    file.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match=str(file)):
        rows_of(Dataset(file, schema, ALONE[name]))


@pytest.mark.parametrize("name", ["viviane", "viviane, columns", "norm"])
def test_any_changed_bit_is_noticed(tmp_path: Path, name: str) -> None:
    data = write_dataset(tmp_path / "set", MIXED, [ROWS], format=ANY_BAGS[name], rows_per_group=2)
    file = data.files[0]
    whole = file.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        file.write_bytes(changed)
        with pytest.raises(VivianeError) as caught:
            rows_of(Dataset(tmp_path / "set"))
        assert file.name in str(caught.value)


def test_a_wrong_check_sum_names_the_block(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", MIXED, [ROWS], format="viviane", rows_per_group=2)
    content = bytearray(data.files[0].read_bytes())
    content[-70] ^= 1
    data.files[0].write_bytes(content)
    with pytest.raises(DataError, match=r"checksum of a block is wrong.*\n.*part-00000.rows, block 1, bytes \d+ to"):
        Dataset(tmp_path / "set").check()
    trusting = VivianeFormat(check_sums="never")
    assert rows_of(Dataset(tmp_path / "set", format=trusting)) != {}


def test_norm_damage_names_row_and_byte(tmp_path: Path) -> None:
    file = write_dataset(tmp_path / "set", ONE_HOT, [FEW], format="norm").files[0]
    whole = file.read_bytes()  # 69 bytes of header, then rows of 4 + 12 + 1 bytes
    assert len(whole) == 69 + 3 * 17

    def damaged(at: int, *new: int) -> str:
        content = bytearray(whole)
        content[at : at + len(new)] = bytes(new)
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError) as caught:
            rows_of(Dataset(tmp_path / "file", ONE_HOT, "norm"))
        return str(caught.value)

    assert "check sum of a record is wrong" in damaged(69 + 17 + 16, 1)
    assert "file, row 1, byte 86" in damaged(69 + 17 + 16, 1)
    assert "length in front of a record" in damaged(69 + 34, 13)
    assert "negative number of keys" in damaged(69 + 34 + 8, 255, 255, 255, 255)
    assert "row 2, byte 103" in damaged(69 + 34 + 8, 255, 255, 255, 255)
    assert "header's length or checksum" in damaged(68, 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, 1, "error_check"),
        (1, 4, "truncated"),
        (1, 2, "bytes after the last row"),
        (1, -1, "negative number of rows"),
        (1, 2**62, "too small for the rows in its header"),
        (2, 2, "label_dim"),
        (3, 1, "dense_dim"),
        (4, 2, "slot_num"),
    ],
)
def test_norm_headers_with_wrong_counts(tmp_path: Path, field: int, value: int, message: str) -> None:
    options = NormFormat(check_sum=False)
    data = write_dataset(tmp_path / "set", ONE_HOT, [{"y": [1, 0, 1], "c": [1, 2, 3]}], format=options)
    content = bytearray(data.files[0].read_bytes())
    struct.pack_into("<q", content, 8 * field, value)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(Dataset(tmp_path / "file", ONE_HOT, options))


@pytest.mark.parametrize("name", ["raw", "raw-async", "norm"])
def test_values_that_the_schema_forbids(tmp_path: Path, name: str) -> None:
    data = write_dataset(tmp_path / "set", ONE_HOT, [FEW], format=ALONE[name])
    narrow = Schema.from_dict({"labels": [{"name": "y"}], "categorical": [{"name": "c", "num_ids": 299}]})
    for _ in range(2):
        with pytest.raises(KeyRangeError, match=r"block 0, column 'c', row 0\n  value:   299"):
            rows_of(Dataset(data.path, narrow))
        with pytest.raises(KeyRangeError):
            rows_of(Dataset(data.files[0], narrow, ALONE[name]), shuffle=True)
    real = Schema.from_dict({**ONE_HOT.to_dict(), "labels": [{"name": "y", "task": "regression"}]})
    other = write_dataset(tmp_path / "real", real, [{"y": [2.0], "c": [1]}], format=name)
    with pytest.raises(DataError, match="neither 0 nor 1"):
        rows_of(Dataset(other.path, ONE_HOT))


def test_parquet_metadata_that_contradicts_the_files(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", MIXED, [ROWS], format="hugectr-parquet")
    path = tmp_path / "set" / "_metadata.json"
    good = json.loads(path.read_text())

    def with_change(**change: object) -> str:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(VivianeError) as caught:
            Dataset(data.path)
        return str(caught.value)

    assert "number of rows" in with_change(file_stats=[{"file_name": "part-00000.parquet", "num_rows": 4}])
    assert "number of rows" in with_change(file_stats=[])
    assert "differ in the columns" in with_change(cats=[{"col_name": "b", "index": 99}])
    assert "missing in _metadata.json" in with_change(cats=[])
    assert "malformed" in with_change(file_stats=[{"file_name": "x"}])
    path.unlink()
    with pytest.raises(DataError, match=r"_metadata\.json is missing"):
        Dataset(data.path)


def test_file_lists(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", ONE_HOT, [FEW], format="norm")
    path = tmp_path / "list.txt"
    for text, message in (
        ("2\nset/part-00000.norm\n", "number of files"),
        ("1\nset/other.norm\n", r"line 2\n  value:   'set/other.norm'"),
        ("0\n", "names no files"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            Dataset(path, ONE_HOT)
    path.write_text("1\nset/part-00000.norm\n\n")
    assert rows_of(Dataset(path, ONE_HOT)) == FEW
    shutil.copy(data.files[0], tmp_path / "plain")
    with pytest.raises(DataError, match="format of the file is unknown"):
        Dataset(tmp_path / "plain", ONE_HOT)


def test_key_sets_cut_inside_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\1\0\0\0\2\0")
    with pytest.raises(DataError, match=r"keys, byte 4\n  value:   '6 bytes'"):
        read_key_set(tmp_path / "keys")
    with pytest.raises(DataError, match="cannot read"):
        read_key_set(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (RawFormat(), {"kind": "multi_hot"}, "one key per slot"),
        (RawAsyncFormat(), {"kind": "multi_hot"}, "fixed number of keys"),
        (RawAsyncFormat(), {"num_ids": 2**33, "dtype": "int64"}, "do not fit 4 bytes"),
        (NormFormat(), {"kind": "multi_hot", "weights": "w"}, "cannot store weights"),
        (NormFormat(slot_sizes=(5, 5)), {}, "one size per slot"),
        (NormFormat(slot_sizes=(299,)), {}, "smaller than its column"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    tmp_path: Path, options: NormFormat, change: dict[str, object], message: str
) -> None:
    schema = ONE_HOT.from_dict({**ONE_HOT.to_dict(), "categorical": [{"name": "c", "num_ids": 300, **change}]})
    with pytest.raises((SchemaError, ConfigError), match=message):
        write_dataset(tmp_path / "set", schema, [], format=options)
    assert not (tmp_path / "set").exists()


def test_rows_that_fixed_records_cannot_hold(tmp_path: Path) -> None:
    bags = Schema.from_dict({"categorical": [{"name": "t", "num_ids": 9, "kind": "multi_hot", "max_length": 2}]})
    for options, rows, message in (
        (RawAsyncFormat(), [[1, 2], [3]], r"row 1\n  value:   1\n  allowed: 2 ids"),
        (RawAsyncFormat(padding=0), [[1], [2, 0]], "ends with the padding id"),
    ):
        with pytest.raises(DataError, match=message):
            write_dataset(tmp_path / "set", bags, [{"t": rows}], format=options)
    real = Schema.from_dict({"labels": [{"name": "y", "task": "regression"}], "dense": [{"name": "x"}]})
    for options, row, message in (
        (RawAsyncFormat(), {"y": [0.5], "x": [1.0]}, "labels are stored as integers"),
        (RawFormat(float_label_dense=False), {"y": [1.0], "x": [1.0]}, r"ln\(k \+ 1\)"),
        (RawFormat(float_label_dense=False), {"y": [1.0], "x": [-1.0]}, r"ln\(k \+ 1\)"),
        (RawFormat(num_samples=2), {"y": [1.0], "x": [1.0]}, "num_samples"),
    ):
        with pytest.raises(DataError, match=message):
            write_dataset(tmp_path / "set", real, [row], format=options)
