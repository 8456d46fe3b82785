"""The fitted ETL: one file, verified when it is read, applied to files and tables with and without labels."""

import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from raw_files import clicks, config, read, text

from viviane.core.errors import DataError, DataNotFoundError
from viviane.data import Dataset
from viviane.etl import FittedEtl, criteo, fit, run


def fitted_clicks(tmp_path: Path) -> FittedEtl:
    return fit(clicks(), text(tmp_path / "raw.csv", "click,item\n1,b\n0,c\n1,c\n"))


def test_one_file_there_and_back_with_equal_bytes(tmp_path: Path) -> None:
    settings = config(
        [{"name": "x", "type": "float"}, {"name": "c"}, {"name": "v", "type": "float", "separator": " "}],
        dense=[
            {"name": "x", "operators": [{"type": "fill", "value": "mean"}, {"type": "standardize"}]},
            {"name": "m", "source": "x", "operators": [{"type": "fill", "value": "median"}]},
            {"name": "v", "dim": 2, "operators": [{"type": "fill"}, {"type": "min_max"}]},
        ],
        categorical=[
            {"name": "c"},
            {"name": "q", "source": "x", "encoding": {"type": "bucketize", "quantiles": 2}},
        ],
    )
    raw = text(tmp_path / "raw.csv", "x,c,v\n1,a,0 4\n3,,\n,b,2 2\n5,a,1 1\n")
    run(settings, raw, tmp_path / "out")
    found = read(tmp_path / "out/train")
    # mean of 1 3 5 is 3; of 1 3 3 5 it is 3 again with variance (4 + 0 + 0 + 4) / 4 = 2
    assert found["x"] == pytest.approx([-(2**0.5), 0, 0, 2**0.5], abs=1e-7)
    assert found["m"] == [1, 3, 3, 5]
    assert found["v"] == [[0, 1], [0, 0], [0.5, 0.5], [0.25, 0.25]]
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    assert fitted.save(tmp_path / "again.zip").read_bytes() == (tmp_path / "out/etl.zip").read_bytes()
    assert (tmp_path / "out/train/etl.zip").read_bytes() == (tmp_path / "out/etl.zip").read_bytes()
    assert fitted.schema == Dataset(tmp_path / "out/train").schema
    with zipfile.ZipFile(tmp_path / "again.zip") as archive:
        assert all(one.compress_type == zipfile.ZIP_STORED for one in archive.infolist())
        assert json.loads(archive.read("manifest.json"))["format"] == "viviane-fitted-etl"


def test_altered_truncated_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    file = fitted_clicks(tmp_path).save(tmp_path / "etl.zip")
    whole = file.read_bytes()
    file.write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"truncated, altered[\s\S]*etl.zip"):
        FittedEtl.load(file)
    at = whole.index(b'"min_count": 1') + len(b'"min_count": ')
    file.write_bytes(whole[:at] + b"2" + whole[at + 1 :])
    with pytest.raises(DataError, match=r"etl.zip"):
        FittedEtl.load(file)
    with zipfile.ZipFile(tmp_path / "etl.zip", "w") as archive, zipfile.ZipFile(_copy(tmp_path, whole)) as old:
        for name in old.namelist():
            data = old.read(name)
            archive.writestr(
                name, data.replace(b'"min_count": 1', b'"min_count": 2') if name == "config.json" else data
            )
    with pytest.raises(DataError, match=r"is altered\n.*etl.zip, config.json"):
        FittedEtl.load(file)
    file.write_text("no zip")
    with pytest.raises(DataError, match="another kind of file"):
        FittedEtl.load(file)
    with pytest.raises(DataError, match="no such fitted ETL"):
        FittedEtl.load(tmp_path / "absent.zip")


def _copy(folder: Path, data: bytes) -> Path:
    (folder / "copy").write_bytes(data)
    return folder / "copy"


def test_a_folder_means_the_etl_in_it(tmp_path: Path) -> None:
    run(clicks(), text(tmp_path / "raw.csv", "click,item\n1,b\n0,c\n1,c\n"), tmp_path / "out")
    of_folder, of_file = (FittedEtl.load(tmp_path / name) for name in ("out", "out/etl.zip"))
    rows = pa.table({"item": ["b", "c"]})
    assert of_folder.transform_table(rows) == of_file.transform_table(rows)
    with pytest.raises(DataNotFoundError, match=r"no such fitted ETL[\s\S]*etl\.zip"):
        FittedEtl.load(tmp_path)


def test_raw_rows_in_memory(tmp_path: Path) -> None:
    fitted = fitted_clicks(tmp_path)
    raw = pa.table({"item": ["c", "", None, "new", "b"]})
    assert fitted.transform_table(raw).to_pydict() == {"item": [3, 1, 1, 2, 4]}
    with_labels = raw.append_column("click", pa.array([1, 0, 1, 0, 1]))
    assert fitted.transform_table(with_labels)["click"].to_pylist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert fitted.transform_table(raw.slice(0, 0)).num_rows == 0
    with pytest.raises(DataError, match="a column is missing"):
        fitted.transform_table(pa.table({"itm": ["c"]}))


def test_errors_and_rejects_name_the_rows_given_and_no_temporary_file(tmp_path: Path) -> None:
    fitted = fitted_clicks(tmp_path)
    raw = pa.table({"item": ["c", "b", "a"], "click": [1, 3, 0]})
    with pytest.raises(DataError, match="malformed") as caught:
        run(fitted, raw, tmp_path / "out")
    assert caught.value.where == "the given Table, row 2, column 'click'"
    with pytest.raises(DataError) as missing:
        run(fitted, raw.drop_columns("item"), tmp_path / "out")
    assert missing.value.where == "the given Table"
    run(fitted, raw.to_pylist(), tmp_path / "out", on_bad_row="reject")
    assert json.loads((tmp_path / "out/rejects.jsonl").read_text())["file"] == "the given list"
    assert Dataset(tmp_path / "out").info["source"] == ["the given list"]


def test_raw_text_and_typed_rows_give_the_same(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.tsv", "1\t7\t0000000a\n0\t\tff\n")
    fitted = fit(criteo(num_dense=1, num_categorical=1, min_count=1), raw)
    as_text = pa.table({"I1": ["7", "", "-2"], "C1": ["0000000a", "FF", ""]})
    typed = pa.table({"I1": [7, None, -2], "C1": pa.array([10, 255, None], pa.uint64())})
    expected = [pytest.approx(2.0794415, abs=1e-6), 0.0, 0.0]
    for table in (as_text, typed):
        found = fitted.transform_table(table).to_pydict()
        assert found["I1"] == expected
        assert found["C1"] == [3, 4, 1]
    with pytest.raises(DataError, match=r"row 1, column 'C1'"):
        fitted.transform_table(pa.table({"I1": ["1", "1"], "C1": ["a", "zz"]}))


@pytest.mark.parametrize("labels", [None, False])
def test_files_without_labels(tmp_path: Path, labels: bool | None) -> None:
    fitted = fit(criteo(num_dense=1, num_categorical=1, min_count=1), text(tmp_path / "raw.tsv", "1\t7\ta\n0\t\tb\n"))
    new = text(tmp_path / "new.tsv", "3\tb\n\tc\n")
    summary = fitted.transform(new, tmp_path / "new", labels=labels)
    assert summary.rows == {"new": 2}
    assert read(tmp_path / "new")["C1"] == [4, 2]
    assert "label" not in read(tmp_path / "new")


def test_an_unfit_column_of_statistics_is_named(tmp_path: Path) -> None:
    settings = config(
        [{"name": "x", "type": "float"}, {"name": "y"}],
        dense=[{"name": "x", "operators": [{"type": "fill", "value": "mean"}]}],
    )
    with pytest.raises(DataError, match=r"no value in the training rows[\s\S]*'x'"):
        fit(settings, text(tmp_path / "raw.csv", "x,y\n,a\n"))
