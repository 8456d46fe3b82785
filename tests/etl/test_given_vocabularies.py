"""Vocabularies that the config gives, and columns left out for their few values."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import config, data_bytes, read, text

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, FittedEtl, run
from viviane.schema import Schema


def given(encoding: dict[str, Any], kind: str = "string", **more: Any) -> EtlConfig:
    return config(
        [{"name": "w", "type": kind}, {"name": "x", "type": "float"}],
        dense=[{"name": "x"}],
        categorical=[{"name": "w", "encoding": {"type": "vocabulary", **encoding}, **more}],
    )


RAW = "w,x\nb,1\na,1\n,1\nnew,1\nb,1\n"


def test_ids_follow_the_order_that_is_given(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", RAW)
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        summary = run(given({"values": ["a", "é", "b"]}), raw, tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    assert summary.num_ids == {"w": 6}  # é is in no row
    assert read(tmp_path / "duckdb/train")["w"] == [5, 3, 1, 2, 5]
    assert Schema.load(tmp_path / "duckdb/train").categorical[0].num_ids == 6


def test_files_of_text_and_parquet_are_kept_in_the_fitted_etl(tmp_path: Path) -> None:
    raw, lines = text(tmp_path / "raw.csv", RAW), text(tmp_path / "words.txt", "\ufeffa\r\né\r\nb\r\n")
    pq.write_table(pa.table({"word": ["a", "é", "b"], "n": [1, 2, 3]}), tmp_path / "words.parquet")
    for number, file in enumerate((lines, tmp_path / "words.parquet")):
        run(given({"file": str(file)}), raw, tmp_path / f"out{number}")
        assert read(tmp_path / f"out{number}/train")["w"] == [5, 3, 1, 2, 5]
        file.unlink()
        fitted = FittedEtl.load(tmp_path / f"out{number}/etl.zip")
        assert fitted.transform_table(pa.table({"w": ["é"], "x": [1.0]}))["w"].to_pylist() == [4]


def test_a_changed_file_is_another_job(tmp_path: Path) -> None:
    raw, words = text(tmp_path / "raw.csv", RAW), tmp_path / "words.txt"
    for content, ids in (("a\nb\n", [4, 3, 1, 2, 4]), ("b\na\n", [3, 4, 1, 2, 3])):
        words.write_text(content)
        run(given({"file": str(words)}), raw, tmp_path / "out", overwrite=content[0] == "b")
        assert read(tmp_path / "out/train")["w"] == ids


@pytest.mark.parametrize(
    ("kind", "values", "cells"),
    [
        ("int", [2**53, 2**53 + 1, -5], [2**53 + 1, -5, 7]),
        ("hex", ["ff", "FFFFFFFFFFFFFFFF", "0"], ["ffffffffffffffff", "000", "1"]),
        ("bool", ["no", 1], ["true", "n", ""]),
    ],
)
def test_numbers(tmp_path: Path, kind: str, values: list[Any], cells: list[Any]) -> None:
    raw = text(tmp_path / "raw.csv", "w,x\n" + "".join(f"{cell},1\n" for cell in cells))
    run(given({"values": values}, kind), raw, tmp_path / "out")
    assert read(tmp_path / "out/train")["w"] == [4, 5 if kind != "bool" else 3, 2 if kind != "bool" else 1]


def test_other_values_take_buckets(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", RAW)
    run(given({"values": ["a"], "unknown_buckets": 5}), raw, tmp_path / "out")
    found = read(tmp_path / "out/train")["w"]
    assert (found[1], found[2]) == (3, 1)
    assert all(4 <= one < 9 for one in (found[0], found[3]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n\nb\n", "(?s)a value of a vocabulary is missing.*value 2"),
        ("a\nb\na\n", "(?s)occurs twice.*value 3"),
        ("", "has no value"),
        (b"\xff\xfe", "cannot be read"),
        (b"PAR1 no", "cannot be read"),
    ],
)
def test_bad_files_are_refused_before_the_work(tmp_path: Path, content: str | bytes, message: str) -> None:
    raw = text(tmp_path / "raw.csv", RAW)
    (tmp_path / "words").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        run(given({"file": str(tmp_path / "words")}), raw, tmp_path / "out")
    with pytest.raises(DataError, match="no such file of a vocabulary"):
        run(given({"file": str(tmp_path / "none")}), raw, tmp_path / "out")
    with pytest.raises(DataError, match=r"(?s)a value of a vocabulary is not a whole number.*value 1"):
        run(given({"values": ["a"]}, "int"), raw, tmp_path / "out")


@pytest.mark.parametrize(
    ("encoding", "more", "message"),
    [
        ({}, {}, "either values or file"),
        ({"values": ["a"], "file": "x"}, {}, "either values or file"),
        ({"values": []}, {}, "at least 1"),
        ({"values": ["a"]}, {"source": ["w", "x"]}, "a vocabulary is given of one column"),
        ({"values": ["1"]}, {"source": "x"}, "a vocabulary is given of one column"),
    ],
)
def test_what_has_no_such_vocabulary_is_refused(encoding: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given(encoding, **more)


def few(least: int, **rest: Any) -> EtlConfig:
    columns = [{"name": name} for name in ("one", "two", "three")]
    every = [{"name": name} for name in ("one", "two", "three")]
    hashed = {"name": "hashed", "source": "one", "encoding": {"type": "hash", "num_ids": 9}}
    return config(columns, min_cardinality=least, categorical=[*every, hashed], **rest)


def test_columns_of_few_values_are_left_out(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "one,two,three\na,a,a\na,b,b\na,,c\n")
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        summary = run(few(3), raw, tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    assert summary.dropped == ["one", "two"]
    assert list(read(tmp_path / "duckdb/train")) == ["three", "hashed"]
    assert run(few(3), raw, tmp_path / "duckdb").dropped == ["one", "two"]  # of the run before
    fitted = FittedEtl.load(tmp_path / "duckdb/etl.zip")
    rows = pa.table({"one": ["a"], "three": ["c"]})  # two is not asked for any more
    assert fitted.transform_table(rows).column_names == ["three", "hashed"]
    fitted.transform(raw, tmp_path / "again")
    assert list(read(tmp_path / "again")) == ["three", "hashed"]
    assert run(few(0), raw, tmp_path / "all").dropped == []


def test_no_column_left_is_an_error(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "one\na\n")
    made = config([{"name": "one"}], min_cardinality=2, categorical=[{"name": "one"}])
    with pytest.raises(DataError, match="every column has fewer values than min_cardinality"):
        run(made, raw, tmp_path / "out")
