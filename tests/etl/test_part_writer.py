"""A part writer encodes beside what adds rows: the same files, and its errors are not lost."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import data_bytes, text

from viviane.etl import criteo, pipeline, run, stage
from viviane.etl.engine import DuckDbEngine
from viviane.etl.write import PartWriter, Sizes
from viviane.schema import DenseColumn, LabelColumn, Schema

SCHEMA = Schema(labels=[LabelColumn(name="click")], dense=[DenseColumn(name="x")], categorical=[])


def rows(start: int, stop: int) -> pa.Table:
    return pa.table({"click": np.zeros(stop - start, np.float32), "x": np.arange(start, stop, dtype=np.float32)})


def add_other_columns(writer: PartWriter) -> None:
    for _ in range(4):  # the error of one is raised when a later one waits for it
        writer.add(rows(0, 15).rename_columns(["click", "y"]))


@pytest.mark.parametrize("step", [1, 7, 10, 64, 200])
def test_row_groups_and_files_do_not_depend_on_what_is_added_at_once(tmp_path: Path, step: int) -> None:
    writer = PartWriter(tmp_path, SCHEMA, Sizes(10, 40))
    for start in range(0, 93, step):
        writer.add(rows(start, min(93, start + step)))
    writer.close(lambda: rows(0, 0))
    files = [pq.ParquetFile(file) for file in sorted(tmp_path.iterdir())]
    groups = [[one.metadata.row_group(i).num_rows for i in range(one.num_row_groups)] for one in files]
    assert groups == [[10] * 4, [10] * 4, [10, 3]]
    assert np.concatenate([one.read().column("x").to_numpy() for one in files]).tolist() == list(range(93))


def test_an_error_while_encoding_is_raised_and_leaves_no_finished_file(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, SCHEMA, Sizes(10, 40))
    writer.add(rows(0, 15))
    with pytest.raises(pa.ArrowInvalid, match="Schema"):
        add_other_columns(writer)
    writer.abandon()
    assert [file.name for file in tmp_path.iterdir()] == [".part-00000.tmp"]


@pytest.mark.parametrize(
    ("num_rows", "groups_per_file"), [(0, 1), (1, 1), (80, 1), (81, 2), (160, 2), (161, 3), (640, 8), (10**9, 8)]
)
def test_files_have_a_row_group_each_until_eight_files_are_not_enough(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, groups_per_file: int
) -> None:
    monkeypatch.setattr("viviane.etl.write.ROWS_PER_GROUP", 10)
    monkeypatch.setattr("viviane.etl.write.ROWS_PER_FILE", 80)
    assert Sizes.of(num_rows) == (10, 10 * groups_per_file)


def test_a_slow_file_does_not_change_the_order_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are whole in another order than they begin; what a kill leaves is numbered without gaps."""
    write, seen = pq.ParquetWriter.write_table, list[list[str]]()

    def slow_first(self: pq.ParquetWriter, table: pa.Table, **settings: object) -> None:
        if table.column("x")[0].as_py() == 0:
            time.sleep(0.1)
        write(self, table, **settings)
        seen.append(sorted(one.name for one in tmp_path.glob("part-*")))

    monkeypatch.setattr(pq.ParquetWriter, "write_table", slow_first)
    writer = PartWriter(tmp_path, SCHEMA, Sizes(10, 10))
    writer.add(rows(0, 35))
    writer.close(lambda: rows(0, 0))
    assert seen[0] == seen[1] == []
    names = [f"part-{number:05}.parquet" for number in range(4)]
    assert all(one == names[: len(one)] for one in seen)
    assert [(one["name"], one["rows"]) for one in writer.files] == list(zip(names, [10, 10, 10, 5], strict=True))
    for one in writer.files:
        assert one["sha256"] == hashlib.sha256((tmp_path / one["name"]).read_bytes()).hexdigest()
    again = PartWriter(tmp_path, SCHEMA, Sizes(10, 10))
    assert (again.files, again.done_rows) == (writer.files, 35)


class Mapping(DuckDbEngine):
    """An engine whose workers are this process."""

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(work, items)


def test_files_of_workers_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.etl.write.ROWS_PER_GROUP", 100)
    monkeypatch.setattr("viviane.etl.write.ROWS_PER_FILE", 200)
    lines = "".join(f"{n % 2}\t{n}\t{n * n % 300:08x}\n" for n in range(3000))
    text(tmp_path / "raw.tsv", lines)
    made, split = criteo(num_dense=1, num_categorical=1), "rows:train=0.6,valid=0.3,test=0.1"
    monkeypatch.setattr(stage.Stager, "hold_bytes", property(lambda _: -1, lambda *_: None), raising=False)
    run(made, tmp_path / "raw.tsv", tmp_path / "one", split=split)
    monkeypatch.setattr(pipeline, "DuckDbEngine", Mapping)
    run(made, tmp_path / "raw.tsv", tmp_path / "workers", split=split)
    assert data_bytes(tmp_path / "one") == data_bytes(tmp_path / "workers")
    manifests = [(tmp_path / out / "train/manifest.json").read_text() for out in ("one", "workers")]
    assert manifests[0] == manifests[1]
    assert len(json.loads(manifests[0])["files"]) == 9
