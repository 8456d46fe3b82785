"""A data set notices what was done to its files: removed, added, changed by a bit, or named by a crafted manifest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.data import Dataset, convert, write_dataset
from viviane.data.formats import HugectrParquetFormat, NormFormat
from viviane.data.formats.file_list import read_file_list, write_file_list
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}], dense=[{"name": "x"}, {"name": "z"}], categorical=[{"name": "c", "num_ids": 50_000}]
)
FORMATS = ["parquet", "viviane", "norm", "raw-async", "hugectr-parquet"]


def rows(count: int = 200, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, count).astype(np.float32)
    return {"y": y, "x": rng.random(count), "z": rng.random(count), "c": rng.integers(3, 50_000, count)}


def make(folder: Path, kind: str = "parquet") -> Dataset:
    return write_dataset(folder, SCHEMA, [rows()], format=kind, rows_per_group=50, rows_per_file=100)


def change_manifest(folder: Path, change: Any) -> None:
    file = folder / "manifest.json"
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_bit_of_every_file_is_covered(kind: str, tmp_path: Path) -> None:
    data = make(tmp_path / "set", kind)
    assert data.verify() == sum(file.stat().st_size for file in data.files)
    rng = np.random.default_rng(1)
    for file in data.files:
        good = file.read_bytes()
        for at in (0, len(good) - 1, *rng.integers(0, len(good), 6).tolist()):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            with pytest.raises(
                DataError, match=r"altered since it was written|damaged|truncated|Norm|not a complete|checksum"
            ):
                Dataset(tmp_path / "set").verify()
        file.write_bytes(good)
    assert Dataset(tmp_path / "set").verify() == data.verify()


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes_are_compared_when_it_is_opened(kind: str, tmp_path: Path) -> None:
    data = make(tmp_path / "set", kind)
    file = data.files[-1]
    good = file.read_bytes()
    for bad in (good[:-1], good + b"\0"):
        file.write_bytes(bad)
        with pytest.raises(DataError, match="size of a file differs from the manifest") as caught:
            Dataset(tmp_path / "set")
        assert file.name in str(caught.value)
    file.unlink()
    with pytest.raises(DataError, match="a file of the manifest is missing"):
        Dataset(tmp_path / "set")


def test_a_part_that_comes_or_goes(tmp_path: Path) -> None:
    make(tmp_path / "set")
    part = tmp_path / "set/part-00001.parquet"
    shutil.copy(part, tmp_path / "set/part-00002.parquet")
    with pytest.raises(DataError, match="its manifest does not list") as caught:
        Dataset(tmp_path / "set")
    assert "part-00002.parquet" in str(caught.value)
    (tmp_path / "set/part-00002.parquet").rename(tmp_path / "set/_part-00002.parquet")  # readers pass over these
    assert len(Dataset(tmp_path / "set")) == 200
    part.unlink()
    with pytest.raises(DataError, match="missing"):
        Dataset(tmp_path / "set")


def test_a_part_with_other_rows_of_the_same_size(tmp_path: Path) -> None:
    make(tmp_path / "set")
    change_manifest(tmp_path / "set", lambda body: body["files"][1].update(rows=99))
    with pytest.raises(DataError, match="number of rows of a file differs from the manifest"):
        Dataset(tmp_path / "set")


def test_data_sets_without_a_manifest_open_still(tmp_path: Path) -> None:
    """Those of earlier releases, and of other programs."""
    made = make(tmp_path / "set")
    (tmp_path / "set/manifest.json").unlink()
    data = Dataset(tmp_path / "set")
    assert data.manifest is None
    assert data.verify() == 0
    assert data.fingerprint == made.fingerprint
    data.check()


def test_a_manifest_without_check_sums_opens_still(tmp_path: Path) -> None:
    make(tmp_path / "set", "viviane")

    def forget(body: Any) -> None:
        for one in body["files"]:
            del one["sha256"]

    change_manifest(tmp_path / "set", forget)
    assert Dataset(tmp_path / "set").verify() == 0


def test_a_bit_in_a_page_of_values_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    """lz4 has no check sum of its own, and most bits of a float are a float."""
    make(tmp_path / "set")
    (tmp_path / "set/manifest.json").unlink()
    part = tmp_path / "set/part-00000.parquet"
    column = pq.read_metadata(part).row_group(0).column(1)
    good, found = part.read_bytes(), 0
    places = range(column.data_page_offset + 60, column.data_page_offset + column.total_compressed_size - 40, 7)
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 16
        part.write_bytes(bad)
        with pytest.raises(DataError, match="cannot be decoded"):
            Dataset(tmp_path / "set").check()
        found += 1
    assert found > 5


def test_schema_json_belongs_to_what_was_written(tmp_path: Path) -> None:
    data = make(tmp_path / "set")
    schema = json.loads((tmp_path / "set/schema.json").read_text())
    schema["categorical"][0]["num_ids"] = 60_000
    (tmp_path / "set/schema.json").write_text(json.dumps(schema))
    with pytest.raises(SchemaError, match="num_ids is 60000, was 50000"):
        Dataset(tmp_path / "set").verify()
    assert len(Dataset(tmp_path / "set")) == len(data)


NAMES = ["../outside", "/etc/hostname", "..\\outside", "C:outside", "a/../../outside", "", ".", "sub//x"]


@pytest.mark.parametrize("kind", ["parquet", "viviane", "norm"])
@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_folder(name: str, kind: str, tmp_path: Path) -> None:
    data = make(tmp_path / "set", kind)
    shutil.copy(data.files[0], tmp_path / "outside")
    change_manifest(tmp_path / "set", lambda body: body["files"][0].update(name=name))
    for _ in (1, 2):
        with pytest.raises(DataError, match=r"points outside its folder|manifest is damaged"):
            Dataset(tmp_path / "set")


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    data = make(tmp_path / "set")
    outside = tmp_path / "outside.parquet"
    data.files[0].rename(outside)
    data.files[0].symlink_to(outside)
    with pytest.raises(DataError, match="a symbolic link points outside"):
        Dataset(tmp_path / "set")
    (tmp_path / "set/manifest.json").unlink()  # files that one arranges oneself
    assert len(Dataset(tmp_path / "set")) == 200


def test_a_file_twice(tmp_path: Path) -> None:
    make(tmp_path / "set")
    change_manifest(tmp_path / "set", lambda body: body["files"].__setitem__(1, body["files"][0]))
    with pytest.raises(DataError, match="names a file twice"):
        Dataset(tmp_path / "set")


@pytest.mark.parametrize(
    "pattern", ["../{}", "/tmp/{}", "a/{}", "same.parquet", "{}{}", "{0.__class__}", "{:>999999999}", "{}\0"]
)
def test_patterns_of_file_names(pattern: str, tmp_path: Path) -> None:
    """They stand in a manifest, too, and whoever writes in the format of a data set writes by them."""
    for kind in (NormFormat, HugectrParquetFormat):
        with pytest.raises(ConfigError, match="file_name"):
            kind(file_name=pattern)
    make(tmp_path / "set", "norm")
    change_manifest(tmp_path / "set", lambda body: body["format"].update(file_name=pattern))
    with pytest.raises(DataError, match="the manifest is damaged"):
        Dataset(tmp_path / "set")


def test_file_lists_found_in_a_folder_name_files_of_it(tmp_path: Path) -> None:
    data = make(tmp_path / "set", "norm")
    shutil.copy(data.files[0], tmp_path / "outside")
    listed = tmp_path / "set/file_list.txt"
    (tmp_path / "set/manifest.json").unlink()
    schema, kind = data.schema, data.format
    assert len(Dataset(tmp_path / "set", schema, kind)) == 200  # absolute names of its own files
    for name in ("../outside", str(tmp_path / "outside")):
        listed.write_text(f"1\n{name}\n")
        with pytest.raises(DataError, match="names a file outside it") as caught:
            Dataset(tmp_path / "set", schema, kind)
        assert "line 2" in str(caught.value)
        assert len(Dataset(listed, schema, kind)) == 100, "a list that one gives may name files anywhere"
    os.mkfifo(tmp_path / "pipe")
    write_file_list(listed, [tmp_path / "pipe"])
    with pytest.raises(DataError, match="missing"):  # a pipe would never end
        read_file_list(listed)


@pytest.mark.parametrize("count", ["9" * 5000, "9" * 40, "\u00b2", "\u0661", "-1", "2", "", "x"])
def test_counts_of_file_lists(tmp_path: Path, count: str) -> None:
    """Python makes no number of 5,000 digits, nor of a superscript."""
    (tmp_path / "one").write_text("")
    (tmp_path / "list").write_text(f"{count}\none\n", encoding="utf-8")
    with pytest.raises(DataError, match="first line of a file list must be the number of files"):
        read_file_list(tmp_path / "list")


def test_metadata_of_hugectr_names_files_of_its_folder(tmp_path: Path) -> None:
    data = make(tmp_path / "set", "hugectr-parquet")
    for name in ("manifest.json", "file_list.txt"):
        (tmp_path / "set" / name).unlink()
    file = tmp_path / "set/_metadata.json"
    body = json.loads(file.read_text())
    for name in ("..", "a\\..\\b.parquet"):
        body["file_stats"][0]["file_name"] = name
        file.write_text(json.dumps(body))
        with pytest.raises(DataError, match="points outside its folder"):
            Dataset(tmp_path / "set", data.schema, "hugectr-parquet")


def test_a_file_that_is_written_again_with_as_many_bytes_is_refused_while_it_is_read(tmp_path: Path) -> None:
    """Its time of change alone tells."""
    data = make(tmp_path / "set", "viviane")
    data.head(1)
    file = data.files[0]
    stamp = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert file.stat().st_size == stamp.st_size
    with pytest.raises(DataError, match="changed after the data set was opened"):
        data.check()
    Dataset(tmp_path / "set").check()


def test_a_converted_data_set_has_check_sums_of_its_own(tmp_path: Path) -> None:
    done = convert(make(tmp_path / "set"), tmp_path / "fast", "viviane")
    assert done.manifest is not None
    assert all(one.sha256 for one in done.manifest.files)
    assert done.verify() > 0
