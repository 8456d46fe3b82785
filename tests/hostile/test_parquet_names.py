"""Parquet files whose column names are no UTF-8: every reader refuses them by name of the file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from viviane import etl
from viviane.core.errors import DataError
from viviane.data.decode import open_parquet


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"click": [0, 1], "user_X9": [3, 4]}), path, store_schema=False)
    data = path.read_bytes()
    assert data.count(b"user_X9") >= 2
    path.write_bytes(data.replace(b"user_X9", b"user_\xd79"))
    with pytest.raises(UnicodeDecodeError):  # what the library says
        pq.ParquetFile(path)
    return path


def test_a_data_set_refuses_it(damaged: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet[\s\S]*utf-8"):
        open_parquet(damaged, lambda schema, where: None)


def test_the_etl_and_its_inference_refuse_it(damaged: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"click": [0, 1] * 20, "user_X9": [3, 4] * 20}), whole)
    config = etl.infer_file(whole).config
    with pytest.raises(DataError, match=r"rows\.parquet[\s\S]*utf-8"):
        etl.run(config, damaged, tmp_path / "clean")
    with pytest.raises(DataError, match=r"rows\.parquet[\s\S]*utf-8"):
        etl.infer_file(damaged)
