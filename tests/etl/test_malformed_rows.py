"""Malformed rows: an error with file, line and column, or set aside and counted; never silently gone."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import clicks, config, read, text, zipped

from viviane.core.errors import ConfigError, DataError
from viviane.etl import EtlConfig, criteo, run

SMALL = criteo(num_dense=1, num_categorical=1, min_count=1)
GOOD = "1\t5\t0000000a\n"


@pytest.mark.parametrize(
    ("line", "column", "problem"),
    [
        ("1\t5", "", "2 columns instead of 3"),
        ("1\t5\t0a\t0a", "", "4 columns instead of 3"),
        ("", "", "an empty line"),
        ("1\tfive\t0a", "I1", "not a finite number"),
        ("1\tinf\t0a", "I1", "not a finite number"),
        ("1\t5\txyz", "C1", "not 1 to 16 hexadecimal digits"),
        ("1\t5\t0000000g", "C1", "not 1 to 16 hexadecimal digits"),
        ("1\t5\t" + "f" * 17, "C1", "not 1 to 16 hexadecimal digits"),
        ("\t5\t0a", "label", "the label is missing"),
        ("2\t5\t0a", "label", "a binary label is neither 0 nor 1"),
    ],
)
def test_criteo_lines(tmp_path: Path, line: str, column: str, problem: str) -> None:
    raw = zipped(tmp_path / "day.gz", GOOD * 3 + line + "\n" + GOOD * 2)
    with pytest.raises(DataError) as caught:
        run(SMALL, raw, tmp_path / "out")
    message = str(caught.value)
    assert problem in message
    assert f"{raw}, line 4" in message
    assert f"column {column!r}" in message or not column
    assert not (tmp_path / "out").exists()

    summary = run(SMALL, raw, tmp_path / "out", on_bad_row="reject")
    assert (summary.rows_in, summary.rejected, summary.rows) == (6, 1, {"train": 5})
    (entry,) = [json.loads(one) for one in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert entry["file"] == str(raw)
    assert (entry["line"], entry["column"], entry["text"]) == (4, column, line)
    assert problem in entry["problem"]
    assert len(read(tmp_path / "out/train")["C1"]) == 5


def test_every_bad_line_is_found_among_many(tmp_path: Path) -> None:
    lines = [GOOD.strip()] * 5000
    for at, bad in {0: "x\ty", 17: "1\tq\t0a", 18: "1\t1\tq", 2500: "", 4998: "0\t1\t2\t3", 4999: "nope\t1\t1"}.items():
        lines[at] = bad
    raw = text(tmp_path / "raw.tsv", "\n".join(lines))  # no newline at the end
    summary = run(SMALL, raw, tmp_path / "out", on_bad_row="reject")
    entries = [json.loads(one) for one in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in entries] == [1, 18, 19, 2501, 4999, 5000]
    assert summary.rejected == 6
    assert summary.rows == {"train": 4994}


def test_all_rows_malformed_is_an_error(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "1,5,0a\n" * 3)
    with pytest.raises(DataError, match="no usable row"):
        run(SMALL, raw, tmp_path / "out", on_bad_row="reject")


def test_empty_lines_at_the_end_and_windows_newlines_are_harmless(tmp_path: Path) -> None:
    raw = tmp_path / "raw.tsv"
    raw.write_bytes(b"\xef\xbb\xbf1\t2\t0a\r\n0\t\t0b\r\n\r\n\r\n")
    assert run(SMALL, raw, tmp_path / "out").rows == {"train": 2}
    assert read(tmp_path / "out/train")["C1"] == [3, 4]


def quoted() -> EtlConfig:
    return config(
        [{"name": "click", "type": "int"}, {"name": "item"}],
        labels=[{"name": "click"}],
        categorical=[{"name": "item"}],
        input={"quote": '"'},
    )


def test_quotes_protect_the_delimiter_but_may_not_span_lines(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", 'click,item\n1,"a,b"\n0,"say ""x"""\n1,"open\n0,z\n1,y\n')
    summary = run(quoted(), raw, tmp_path / "out", on_bad_row="reject")
    assert summary.rejected == 1
    entry = json.loads((tmp_path / "out/rejects.jsonl").read_text())
    assert (entry["line"], entry["problem"]) == (4, "a quote is not closed on its line")
    assert read(tmp_path / "out/train")["item"] == [3, 4, 6, 5]  # a,b  say "x"  y  z


def test_text_that_is_not_utf8_is_named_and_other_encodings_are_read(tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_bytes(b"click,item\n1,a\n0,caf\xe9\n")
    with pytest.raises(DataError, match=r"not UTF-8 text\n  where:   .*raw.csv, line 3, column 'item'"):
        run(clicks(), raw, tmp_path / "out")
    latin = clicks().to_dict() | {"input": clicks().input.to_dict() | {"encoding": "latin-1"}}
    run(EtlConfig.from_dict(latin), raw, tmp_path / "out")
    table = pq.read_table(_vocabulary(tmp_path / "out/etl.zip"))
    assert table["value"].to_pylist() == ["a", "caf\u00e9"]


def _vocabulary(file: Path) -> Any:
    import io
    import zipfile

    return io.BytesIO(zipfile.ZipFile(file).read("vocabularies/00000.parquet"))


def test_delimiters_of_several_characters(tmp_path: Path) -> None:
    raw = text(tmp_path / "ratings.dat", "1::10::5\n1::11::3\n2::10::4\n")
    settings = config(
        [{"name": "user", "type": "int"}, {"name": "movie", "type": "int"}, {"name": "rating", "type": "float"}],
        labels=[{"name": "liked", "source": "rating", "operators": [{"type": "threshold", "at": 4}]}],
        categorical=[{"name": "user"}, {"name": "movie"}],
        filters=[{"column": "rating", "keep": "!=", "value": 3}],
        ignored=["rating"],
        input={"delimiter": "::", "header": False},
    )
    summary = run(settings, raw, tmp_path / "out")
    assert (summary.filtered, summary.rows) == (1, {"train": 2})
    # the vocabulary is learned from the rows that are left
    assert read(tmp_path / "out/train") == {"liked": [1.0, 1.0], "user": [3, 4], "movie": [3, 3], "rating": [5.0, 4.0]}


def test_truncated_gzip_names_the_file(tmp_path: Path) -> None:
    raw = tmp_path / "day.gz"
    import random

    noise = random.Random(0)
    raw.write_bytes(
        gzip.compress("".join(f"1\t5\t{noise.getrandbits(32):08x}\n" for _ in range(9000)).encode())[:-5000]
    )
    with pytest.raises(DataError, match=r"truncated or altered[\s\S]*day.gz"):
        run(SMALL, raw, tmp_path / "out")


def test_parquet_of_a_wrong_type_truncated_or_short_of_a_column(tmp_path: Path) -> None:
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"click": [1.5, 0.0], "item": ["a", "b"]}), raw)
    with pytest.raises(
        DataError, match=r"type that the config does not expect\n.*raw.parquet, column 'click'\n.*'double'"
    ):
        run(clicks(), raw, tmp_path / "out")
    pq.write_table(pa.table({"click": [1, 0]}), raw)
    with pytest.raises(DataError, match=r"a column is missing[\s\S]*'item'"):
        run(clicks(), raw, tmp_path / "out")
    pq.write_table(pa.table({"click": [1, 0], "item": ["a", "b"]}), raw)
    raw.write_bytes(raw.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"truncated, altered or no Parquet file[\s\S]*raw.parquet"):
        run(clicks(), raw, tmp_path / "out")


def test_parquet_rows_can_be_rejected(tmp_path: Path) -> None:
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"click": [1, None, 7, 0], "item": ["a", "b", "c", "d"]}), raw)
    assert run(clicks(), raw, tmp_path / "out", on_bad_row="reject").rejected == 2
    entries = [json.loads(one) for one in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in entries] == [2, 3]
    assert json.loads(entries[1]["text"]) == {"click": 7, "item": "c"}


def test_header_and_missing_numbers(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "clicks,item\n1,a\n")
    with pytest.raises(DataError, match=r"missing in the header[\s\S]*did you mean 'clicks'"):
        run(clicks(), raw, tmp_path / "out")
    settings = config([{"name": "x", "type": "float"}], dense=[{"name": "x"}])
    raw = text(tmp_path / "x.csv", "x\n1\nnan\n")
    with pytest.raises(DataError, match="missing values remain in a column of numbers"):
        run(settings, raw, tmp_path / "out")
    with pytest.raises(DataError, match="no such input file"):
        run(settings, tmp_path / "absent.csv", tmp_path / "out")


def test_configs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="did you mean 'item'"):
        config([{"name": "item"}], categorical=[{"name": "itme"}])
    with pytest.raises(ConfigError, match="needs numbers"):
        config([{"name": "item"}], dense=[{"name": "item"}])
    with pytest.raises(ConfigError, match="is a list"):
        config([{"name": "item", "separator": "|"}], categorical=[{"name": "item"}])
    with pytest.raises(ConfigError, match="unknown key"):
        config([{"name": "item"}], categorical=[{"name": "item", "encoding": {"type": "categorify", "min_cuont": 2}}])
