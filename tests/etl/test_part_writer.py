"""A part writer encodes beside what adds rows: the same files, and its errors are not lost."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from viviane.etl.write import PartWriter
from viviane.schema import DenseColumn, LabelColumn, Schema

SCHEMA = Schema(labels=[LabelColumn(name="click")], dense=[DenseColumn(name="x")], categorical=[])


def rows(start: int, stop: int) -> pa.Table:
    return pa.table({"click": np.zeros(stop - start, np.float32), "x": np.arange(start, stop, dtype=np.float32)})


def add_other_columns(writer: PartWriter) -> None:
    for _ in range(4):  # the error of one is raised when a later one waits for it
        writer.add(rows(0, 15).rename_columns(["click", "y"]))


@pytest.mark.parametrize("step", [1, 7, 10, 64, 200])
def test_row_groups_and_files_do_not_depend_on_what_is_added_at_once(tmp_path: Path, step: int) -> None:
    writer = PartWriter(tmp_path, SCHEMA, sizes=(10, 40))
    for start in range(0, 93, step):
        writer.add(rows(start, min(93, start + step)))
    writer.close(lambda: rows(0, 0))
    files = [pq.ParquetFile(file) for file in sorted(tmp_path.iterdir())]
    groups = [[one.metadata.row_group(i).num_rows for i in range(one.num_row_groups)] for one in files]
    assert groups == [[10] * 4, [10] * 4, [10, 3]]
    assert np.concatenate([one.read().column("x").to_numpy() for one in files]).tolist() == list(range(93))


def test_an_error_while_encoding_is_raised_and_leaves_no_finished_file(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, SCHEMA, sizes=(10, 40))
    writer.add(rows(0, 15))
    with pytest.raises(pa.ArrowInvalid, match="Schema"):
        add_other_columns(writer)
    writer.abandon()
    assert [file.name for file in tmp_path.iterdir()] == [".part-00000.tmp"]
