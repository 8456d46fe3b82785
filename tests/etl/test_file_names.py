"""The name of a file as a column; texts of missing values beside the empty one."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import config, data_bytes, read, text

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, FittedEtl, SequenceConfig, run, sequences


def named(**input: Any) -> EtlConfig:
    return config(
        [{"name": "x", "type": "float"}, {"name": "file"}],
        input={"file_name": "file", **input},
        dense=[{"name": "x"}],
        categorical=[{"name": "file"}],
    )


@pytest.mark.parametrize("header", [True, False])
def test_of_text_gzip_and_parquet(tmp_path: Path, header: bool) -> None:
    head = "x\n" if header else ""
    text(tmp_path / "a.csv", head + "1\n2\n")
    (tmp_path / "b=1.csv.gz").write_bytes(gzip.compress((head + "3\n").encode()))
    pq.write_table(pa.table({"x": [4.0, 5.0, 6.0]}), tmp_path / "c d.parquet")
    files = [tmp_path / name for name in ("a.csv", "b=1.csv.gz", "c d.parquet")]
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(named(header=header), files, tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    found = read(tmp_path / "duckdb/train")
    fitted = FittedEtl.load(tmp_path / "duckdb/etl.zip")
    assert fitted.vocabularies["file"].values.to_pylist() == ["c d.parquet", "a.csv", "b=1.csv.gz"]
    assert found["file"] == [4, 4, 5, 3, 3, 3]
    # Rows in memory bring the column, as they bring every other.
    rows = pa.table({"x": [1.0, 2.0], "file": ["a.csv", "new.csv"]})
    assert fitted.transform_table(rows)["file"].to_pylist() == [4, 2]
    with pytest.raises(DataError, match="a column is missing"):
        fitted.transform_table(rows.drop(["file"]))


def test_beside_columns_of_folders(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "day=3"
    folder.mkdir(parents=True)
    text(folder / "a.csv", "x\n1\n")
    columns = [{"name": "x", "type": "float"}, {"name": "day", "type": "int"}, {"name": "file"}]
    both = {"file_name": "file", "hive_partitioning": True}
    settings = config(columns, input=both, dense=[{"name": "x"}, {"name": "day"}], categorical=[{"name": "file"}])
    run(settings, tmp_path / "logs", tmp_path / "out")
    assert read(tmp_path / "out/train") == {"x": [1.0], "day": [3.0], "file": [3]}
    columns[1] = {"name": "day"}
    clash = config(columns, input={**both, "file_name": "day"}, dense=[{"name": "x"}], categorical=[{"name": "day"}])
    with pytest.raises(ValueError, match="file_name is also the name of a folder's column"):
        run(clash, tmp_path / "logs", tmp_path / "other")


def test_a_file_with_such_a_column_is_refused(tmp_path: Path) -> None:
    text(tmp_path / "a.csv", "x,file\n1,z\n")
    with pytest.raises(DataError, match="both in the file and in its path"):
        run(named(), tmp_path / "a.csv", tmp_path / "out")


@pytest.mark.parametrize("column", [{"name": "other"}, {"name": "file", "type": "int"}, {"name": "file", "list": True}])
def test_the_column_has_to_be_declared(column: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="file_name 'file': add"):
        config([{"name": "x"}, column], input={"file_name": "file"}, categorical=[{"name": "x"}])


def test_rows_to_sequences_take_it_too(tmp_path: Path) -> None:
    text(tmp_path / "a.csv", "u,t\nann,1\nbob,2\n")
    text(tmp_path / "b.csv", "u,t\nann,3\n")
    columns = [{"name": "u"}, {"name": "t", "type": "int"}, {"name": "file"}]
    made = SequenceConfig.from_dict(
        {
            "input": {"columns": columns, "file_name": "file"}, "by": "u", "order_by": "t",
            "columns": [{"name": "files", "source": "file", "last": 9}],
        }
    )  # fmt: skip
    sequences(made, [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    assert read(tmp_path / "out")["files"] == [["a.csv", "b.csv"], ["a.csv"]]


def test_the_empty_text_stays_missing_beside_others(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "x,w\n1,\nNA,b\n,NA\n4,b\n")
    columns = [{"name": "x", "type": "float"}, {"name": "w"}]
    rest: dict[str, Any] = {
        "dense": [{"name": "x", "operators": [{"type": "fill", "value": -1}]}],
        "categorical": [{"name": "w"}],
    }
    made = config(columns, input={"missing": ["NA"]}, **rest)
    assert made.input.missing == ("", "NA")
    run(made, raw, tmp_path / "out")
    assert read(tmp_path / "out/train") == {"x": [1.0, -1.0, -1.0, 4.0], "w": [1, 3, 1, 3]}
    again = FittedEtl.load(tmp_path / "out/etl.zip")
    assert again.config == made
    assert again.transform_table(pa.table({"x": ["NA"], "w": [""]}))["w"].to_pylist() == [1]

    kept = config(columns, input={"missing": ["NA"], "empty_is_missing": False}, **rest)
    assert EtlConfig.from_dict(kept.to_dict()) == kept
    assert kept.input.missing == ("NA",)
    summary = run(kept, raw, tmp_path / "kept", on_bad_row="reject")
    assert summary.rejected == 1  # an empty text is no number
    assert read(tmp_path / "kept/train")["w"] == [4, 3, 3]  # and a word like others
    with pytest.raises(ValueError, match="empty_is_missing is false"):
        config(columns, input={"missing": ["", "NA"], "empty_is_missing": False}, **rest)
