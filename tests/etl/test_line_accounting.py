"""Rows in = rows out + rejects + filtered: whatever the bytes are, in both modes and on every engine."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import clicks, config, read, text

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, FittedEtl, SequenceConfig, Summary, run, sequences, sources
from viviane.etl import text as text_module

COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"},
    {"name": "x", "type": "float"},
    {"name": "n", "type": "int"},
    {"name": "c"},
    {"name": "h", "type": "hex"},
    {"name": "t", "type": "timestamp"},
    {"name": "tags", "separator": "|", "type": "float"},
]
GOOD = b"1,0.5,3,pen,0a,2024-01-01,1|2"
FILL = {"type": "fill", "value": 0}
STANDARD = {"type": "standardize"}


def every_type(**input: Any) -> EtlConfig:
    return config(
        COLUMNS,
        labels=[{"name": "y"}],
        derived=[
            {"type": "date_part", "name": "year", "source": "n", "part": "year", "unit": "s"},
            {"type": "difference_lag", "name": "lag", "source": "x", "by": "c", "order_by": "t"},
            {"type": "group_statistics", "name": "g", "by": "c", "of": "x", "statistics": ["std", "sum"]},
        ],
        dense=[
            {"name": "x", "operators": [FILL, STANDARD]},
            {"name": "lag", "operators": [FILL]},
            {"name": "g_x_std", "operators": [FILL]},
        ],
        categorical=[
            {"name": "c"},
            {"name": "h"},
            {"name": "year"},
            {"name": "big", "source": "x", "operators": [FILL, {"type": "log_square"}]},
            {"name": "tags", "kind": "multi_hot", "encoding": {"type": "hash", "num_ids": 99}},
        ],
        ignored=["t"],
        input={"header": False, **input},
    )


def with_input(settings: EtlConfig, **input: Any) -> EtlConfig:
    return EtlConfig.from_dict(settings.to_dict() | {"input": settings.input.to_dict() | input})


def num_rows(data: bytes) -> int:
    """What the documentation says: lines end with a newline, and those at the end that hold nothing are none."""
    lines = data.split(b"\n")
    while lines and not lines[-1].strip(b"\r"):
        lines.pop()
    return len(lines)


def accounted(settings: Any, files: list[Path], output: Path, **options: Any) -> Summary | None:
    """Run in both modes, and compare all counts; returns the summary, None where no row is usable."""
    rows_in = sum(
        num_rows(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw) for raw in map(Path.read_bytes, files)
    )
    rows_in -= len(files) * settings.input.header
    try:
        summary = run(settings, files, output, on_bad_row="reject", overwrite=True, **options)
    except DataError as error:
        # A part of the split may come out empty; anything else is a failure of the run.
        assert "no usable row" in str(error) or "has no rows" in str(error), error  # noqa: PT017
        return None
    assert summary.rows_in == rows_in
    assert summary.rows_in == sum(summary.rows.values()) + summary.rejected + summary.filtered
    written = sum(pq.ParquetFile(file).metadata.num_rows for file in output.glob("*/part-*.parquet"))
    assert written == sum(summary.rows.values())
    rejects = output / "rejects.jsonl"
    entries = [json.loads(line) for line in rejects.read_text().split("\n")[:-1]] if rejects.exists() else []
    places = [(entry["file"], entry["line"]) for entry in entries]
    assert len(set(places)) == len(places) == summary.rejected
    order = [str(file.resolve()) for file in files]
    assert places == sorted(places, key=lambda place: (order.index(place[0]), place[1]))
    for entry in entries:
        raw = Path(entry["file"]).read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        line = raw.split(b"\n")[entry["line"] - 1]
        line = line.removeprefix(b"\xef\xbb\xbf") if entry["line"] == 1 else line
        assert entry["text"].rstrip("\r") == text_module.shown_line(line, settings.input.encoding).rstrip("\r")
    if entries:
        with pytest.raises(DataError, match="a malformed row") as caught:
            run(settings, files, output, on_bad_row="error", overwrite=True, **options)
        assert f"{places[0][0]}, line {places[0][1]}" in str(caught.value)
    else:
        assert run(settings, files, output, on_bad_row="error", overwrite=True, **options).rows == summary.rows
    return summary


BAD_LINES = [
    (b"1,0.5,3,p\ren,0a,2024-01-01,1", "a carriage return inside the line"),
    (b"1,0.5,3,pen,0a,2024-01-01,1\r1,0.5,3,pen,0a,2024-01-01,1", "a carriage return inside the line"),
    (b"1,0.5,3,pen,0a,2024-01-01,1\r\r", "a carriage return inside the line"),
    (b"\r\r", "a carriage return inside the line"),
    (b"1,0.5,\xff", "3 columns instead of 7"),
    (b"1,0.5,3,p\xffen,0a,2024-01-01,1,\xff", "8 columns instead of 7"),
    (b"1,0.5,3,p\xffen,0a,2024-01-01,1", "not UTF-8 text"),
    (b"1,1e39,3,pen,0a,2024-01-01,1", "does not fit float32"),
    (b"1,-3e38,3,pen,0a,2024-01-01,1", "does not fit float32"),  # of a lag: the difference of two does not
    (b"1,1e300,3,pen,0a,2024-01-01,1", "does not fit float32"),
    (b"1,1e400,3,pen,0a,2024-01-01,1", "not a finite number"),
    (b"1,0.5,3,pen,0a,2024-01-01,inf|-inf", "a list element is not a finite number"),
    (b"1," + b"9" * 5000 + b",3,pen,0a,2024-01-01,1", "not a finite number"),
    (b"1,0.5," + b"9" * 5000 + b",pen,0a,2024-01-01,1", "not a whole number of 64 bits"),
    (b"1,0.5,3.9,pen,0a,2024-01-01,1", "not a whole number of 64 bits"),
    (b"1,0.5,9223372036854775807,pen,0a,2024-01-01,1", "not a time in s since 1970"),
    (b"9" * 5000 + b",0.5,3,pen,0a,2024-01-01,1", "not a whole number of 64 bits"),
    (b"1,0.5,3,pen," + b"9" * 5000 + b",2024-01-01,1", "hexadecimal"),
    (b"1,0.5,3,pen,0a,10000-01-01,1", "not a date and time"),
    (b"1,0.5,3,pen,0a,2024-01-01,1|x", "a list element is not a finite number"),
    (b"\0", "1 columns instead of 7"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_one_reject(tmp_path: Path, line: bytes, problem: str) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\r\n")
    with pytest.raises(DataError, match=r"line 2"):
        run(every_type(), raw, tmp_path / "out")
    summary = run(every_type(), raw, tmp_path / "out", on_bad_row="reject")
    assert (summary.rows_in, summary.rejected, summary.rows) == (3, 1, {"train": 2})
    (entry,) = [json.loads(one) for one in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert entry["line"] == 2
    assert problem in entry["problem"]


@pytest.mark.parametrize("value", [b"1e300", b"3.5e38"])
def test_huge_numbers_that_operators_tame_are_kept(tmp_path: Path, value: bytes) -> None:
    settings = config(
        [{"name": "x", "type": "float"}],
        dense=[
            {"name": "x", "operators": [{"type": "log"}, STANDARD]},
            {"name": "z", "source": "x", "operators": [{"type": "clip", "min": -5, "max": 5}]},
        ],
        categorical=[{"name": "b", "source": "x", "encoding": {"type": "bucketize", "borders": [0, 1e305]}}],
    )
    raw = tmp_path / "raw.csv"
    raw.write_bytes(b"x\n1\n" + value + b"\n2\n-" + value + b"\n")
    assert run(settings, raw, tmp_path / "out").rows == {"train": 4}
    assert read(tmp_path / "out/train")["z"][1] == 5


def test_a_fitted_etl_rejects_what_its_statistics_blow_up(tmp_path: Path) -> None:
    settings = config([{"name": "x", "type": "float"}], dense=[{"name": "x", "operators": [STANDARD]}])
    run(settings, text(tmp_path / "train.csv", "x\n0\n1e-20\n"), tmp_path / "fitted")
    fitted = FittedEtl.load(tmp_path / "fitted/etl.zip")
    later = text(tmp_path / "later.csv", "x\n0\n1e25\n1\n")
    with pytest.raises(DataError, match=r"does not fit float32\n.*later.csv, line 3, column 'x'"):
        fitted.transform(later, tmp_path / "out")
    summary = fitted.transform(later, tmp_path / "out", on_bad_row="reject")
    assert (summary.rows_in, summary.rejected, summary.rows) == (3, 1, {"out": 2})
    with pytest.raises(DataError, match=r"does not fit float32\n.*row 1, column 'x'"):
        fitted.transform_table(pa.table({"x": [0.0, 1e25]}))


def test_weights_of_a_bag_and_labels_fit_float32(tmp_path: Path) -> None:
    settings = config(
        [{"name": "y", "type": "float"}, {"name": "v", "list": True}, {"name": "w", "type": "float", "list": True}],
        labels=[{"name": "y", "task": "regression"}],
        categorical=[{"name": "v", "kind": "multi_hot", "weights": "w"}],
    )
    table = {"y": [1.0, 1e39, 2.0, 3.0], "v": [["a"], ["b"], ["c", "d"], []], "w": [[1.0], [1.0], [1.0, -1e39], []]}
    pq.write_table(pa.table(table), tmp_path / "raw.parquet")
    summary = run(settings, tmp_path / "raw.parquet", tmp_path / "out", on_bad_row="reject")
    entries = [json.loads(one) for one in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["column"]) for entry in entries] == [(2, "y"), (3, "w")]
    assert (summary.rejected, summary.rows) == (2, {"train": 2})


def test_parquet_text_that_is_not_utf8_and_times_beyond_python_are_rejects(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    broken = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffb"))
    times = pa.array([0, 1, 2**62], pa.int64()).cast(pa.timestamp("ms"))
    pq.write_table(pa.table({"item": broken, "t": times}), tmp_path / "raw.parquet")
    settings = config(
        [{"name": "item"}, {"name": "t", "type": "timestamp"}], categorical=[{"name": "item"}], ignored=["t"]
    )
    summary = run(settings, tmp_path / "raw.parquet", tmp_path / "out", on_bad_row="reject")
    assert (summary.rows_in, summary.rejected, summary.rows) == (3, 2, {"train": 1})
    entries = [json.loads(one) for one in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["column"]) for entry in entries] == [(2, "item"), (3, "t")]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_kind_of_text_in_parquet_has_missing_values(tmp_path: Path, kind: Any) -> None:
    table = pa.table({"click": [1, 0, 1], "item": pa.array(["a", "", None]).cast(kind)})
    pq.write_table(table, tmp_path / "raw.parquet")
    run(clicks(), tmp_path / "raw.parquet", tmp_path / "out")
    assert read(tmp_path / "out/train")["item"] == [3, 1, 1]


@pytest.mark.parametrize(
    ("encoding", "line", "problem"),
    [
        ("utf-7", b"1,+AAo-", "a line end that is encoded"),
        ("raw_unicode_escape", b"1,a\\u000ab", "a line end that is encoded"),
        ("raw_unicode_escape", b"1,a\\u0", "not raw_unicode_escape text"),
        ("cp1252", b"1,\x81", "not cp1252 text"),
        ("shift_jis", b"1,\x81", "not shift_jis text"),
        ("ascii", "1,é".encode(), "not ascii text"),
    ],
)
def test_other_encodings_keep_the_count_of_lines(tmp_path: Path, encoding: str, line: bytes, problem: str) -> None:
    settings = with_input(clicks(), encoding=encoding)
    raw = tmp_path / "raw.csv"
    raw.write_bytes(b"click,item\n1,a\n" + line + b"\n0,b\n")
    summary = accounted(settings, [raw], tmp_path / "out")
    assert summary is not None
    assert (summary.rejected, summary.rows) == (1, {"train": 2})
    summary = run(settings, raw, tmp_path / "again", on_bad_row="reject")
    (entry,) = [json.loads(one) for one in (tmp_path / "again/rejects.jsonl").read_text().splitlines()]
    assert problem in entry["problem"]


def test_a_delimiter_of_several_bytes_and_its_stand_in(tmp_path: Path) -> None:
    for delimiter in ("::", "¦", "\u2063"):
        raw = tmp_path / "raw.txt"
        raw.write_text(f"click{delimiter}item\n1{delimiter}a\n0\x1fb\n1{delimiter}c\x1fd\n0{delimiter}b\n")
        settings = EtlConfig.from_dict(
            clicks().to_dict() | {"input": clicks().input.to_dict() | {"delimiter": delimiter}}
        )
        summary = accounted(settings, [raw], tmp_path / "out")
        assert summary is not None
        assert (summary.rows_in, summary.rejected) == (4, 2)


@pytest.mark.parametrize("bad", [b"", b"1,x\n"], ids=["parsed at once", "parsed line by line"])
def test_quotes_mean_the_same_whatever_stands_beside_them(tmp_path: Path, bad: bytes) -> None:
    """A block with a malformed row is parsed another way, which must not change its good rows."""
    settings = with_input(clicks(), quote='"')
    rows = [b'1,"a,b"', b'0,"a"b', b'1,x"y"', b'0,"say ""x"""', b'1,""', b'0,"""abc"""', b'1,a"b', b"0,'"]
    raw = tmp_path / "raw.csv"
    raw.write_bytes(b"click,item\n" + b"".join(row + b"\n" for row in rows) + bad.replace(b"1,", b"7,"))
    summary = run(settings, raw, tmp_path / "out", on_bad_row="reject")
    assert summary.rows == {"train": len(rows)}
    known = pq.read_table(pa.BufferReader(_member(tmp_path / "out/etl.zip")))["value"].to_pylist()
    found = [None if i == 1 else known[i - 3] for i in read(tmp_path / "out/train")["item"]]
    assert found == ["a,b", "ab", 'x"y"', 'say "x"', None, '"abc"', 'a"b', "'"]


def _member(file: Path) -> bytes:
    import zipfile

    return zipfile.ZipFile(file).read("vocabularies/00000.parquet")


def test_empty_lines_at_the_end_are_no_rows_wherever_blocks_end(tmp_path: Path, monkeypatch: Any) -> None:
    raw = tmp_path / "raw.csv"
    for data in (
        b"1,a\n\n0,b\n\n\r\n\n",
        b"1,a\r\n0,b\r\n\r\n",
        b"1,a\n0,b",
        b"1,a\n0,b\r",
        b"\n\n1,a\n0,b\n" + b"\n" * 40,
    ):
        raw.write_bytes(data)
        found = set()
        for size in (1, 2, 3, 5, 7, 16, 1 << 20):
            source = sources.find_sources(raw)[0]
            blocks = list(sources.text_blocks(source, block_bytes=size))
            assert all(block.data.endswith(b"\n") and block.data.count(b"\n") == block.num_lines for block in blocks)
            lines = b"".join(block.data for block in blocks).split(b"\n")[:-1]
            assert [block.first_line for block in blocks] == [
                1 + sum(one.num_lines for one in blocks[:at]) for at in range(len(blocks))
            ]
            found.add(tuple(line.removesuffix(b"\r") for line in lines))
        assert len(found) == 1
        assert len(found.pop()) == num_rows(data)


def test_rejects_take_linear_time(tmp_path: Path) -> None:
    """Each reject split its whole block again: 20,000 rows with 8,624 rejects took 44 to 85 s, with one 1.4 s."""
    seconds = []
    for num_bad in (1, 2_500, 5_000):
        lines = [b"1,0.5,x,pen,0a,2024-01-01,1"] * num_bad + [GOOD] * (10_000 - num_bad)
        (tmp_path / "raw.csv").write_bytes(b"\n".join(lines))
        start = time.process_time()
        summary = run(every_type(), tmp_path / "raw.csv", tmp_path / "out", on_bad_row="reject", overwrite=True)
        seconds.append(time.process_time() - start)
        assert summary.rejected == num_bad
    # The first run may also pay for imports, which would make the second one seem to take less than nothing.
    assert seconds[2] - seconds[0] < 3 * max(0.0, seconds[1] - seconds[0]) + 0.5
    assert seconds[2] < 3 * seconds[0] + 1


@pytest.mark.parametrize("header", [True, False])
def test_a_carriage_return_in_a_quoted_file_is_no_error_of_the_csv_module(tmp_path: Path, header: bool) -> None:
    settings = with_input(clicks(), quote='"', header=header)
    head = "click,item\n" if header else ""
    run(settings, text(tmp_path / "train.csv", f"{head}1,a\n0,b\n"), tmp_path / "fitted")
    fitted = FittedEtl.load(tmp_path / "fitted/etl.zip")
    raw = tmp_path / "later.csv"
    raw.write_bytes(head.encode() + b"1,a\rx\n0,b\n")
    assert fitted.transform(raw, tmp_path / "out", on_bad_row="reject").rejected == 1
    raw.write_bytes(b"click,it\rem\n1,a\n")
    if header:
        with pytest.raises(DataError, match="a carriage return inside the header"):
            fitted.transform(raw, tmp_path / "again")


def test_one_malformed_line_does_not_make_a_file_one_without_labels(tmp_path: Path) -> None:
    settings = with_input(clicks(), header=False)
    run(settings, text(tmp_path / "train.csv", "1,a\n0,b\n"), tmp_path / "fitted")
    fitted = FittedEtl.load(tmp_path / "fitted/etl.zip")
    summary = fitted.transform(text(tmp_path / "a.csv", "x\n1,a\n0,b\n"), tmp_path / "a", on_bad_row="reject")
    assert (summary.rejected, summary.rows) == (1, {"a": 2})
    assert "click" in read(tmp_path / "a")
    fitted.transform(text(tmp_path / "b.csv", "a\n1,a\nb\n"), tmp_path / "b", on_bad_row="reject")
    assert read(tmp_path / "b") == {"item": [3, 4]}


TOKENS: list[bytes] = [
    b"\r", b"\n", b"\r\n", b"\xff", b"\xef\xbb\xbf", b"\0", b"\x1f", b'"', b'""', b",", b",,", b"|", b"::", b" ", b"-",
    b"1e39", b"1e300", b"-1e308", b"nan", b"inf", b"9" * 400, b"0x1", b"3.9", b"\xed\xa0\x80", b"\xc3", b"\\n",
    b"+AAo-", b"2024-02-30", b"9999-12-31 23:59:59", b"\x1a", b"\x85", "\u2028".encode(), b"NULL", b"1|", b"||",
    b"'", b"\t",
]  # fmt: skip
INPUTS: list[dict[str, Any]] = [
    {}, {"quote": '"'}, {"delimiter": "::"}, {"encoding": "latin-1"}, {"encoding": "utf-7"}, {"encoding": "cp1252"},
    {"header": True}, {"quote": '"', "header": True, "encoding": "shift_jis"},
    {"delimiter": "¦", "missing": ["", "NULL"]},
]  # fmt: skip


def mutated(chance: random.Random, row: bytes) -> bytes:
    for _ in range(chance.choice([0, 0, 0, 1, 1, 2])):
        at = chance.randrange(len(row) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            row = row[:at] + chance.choice(TOKENS) + row[at:]
        elif kind == 1:
            row = row[:at] + row[at + chance.randrange(4) :]
        elif kind == 2:
            row = row[:at] + bytes([chance.randrange(256)]) + row[at + 1 :]
        else:
            cells = row.split(b",")
            cells[chance.randrange(len(cells))] = chance.choice(TOKENS)
            row = b",".join(cells)
    return row


def fuzzed(chance: random.Random, folder: Path, settings: dict[str, Any], rows: int) -> list[Path]:
    """One to three files, gzip or not, with a header where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(chance.choice([1, 1, 3])):
        lines = [mutated(chance, GOOD) for _ in range(rows)]
        data = b"".join(line + chance.choice([b"\n", b"\n", b"\r\n"]) for line in lines)
        data = data.replace(b",", settings.get("delimiter", ",").encode())
        if settings.get("header"):
            data = b",".join(column["name"].encode() for column in COLUMNS) + b"\n" + data
        data = chance.choice([b"", b"", b"\xef\xbb\xbf"]) + data + chance.choice([b"", b"\n\n\r\n", GOOD, GOOD + b"\r"])
        zipped = chance.random() < 0.3
        files.append(folder / f"raw-{number}.csv{'.gz' if zipped else ''}")
        files[-1].write_bytes(gzip.compress(data) if zipped else data)
    return files


def fuzz(folder: Path, seed: int, rows: int, **options: Any) -> int:
    chance = random.Random(seed)
    settings = INPUTS[seed % len(INPUTS)]
    files = fuzzed(chance, folder / "raw", settings, rows)
    made = every_type(**settings)
    split = chance.choice([None, "hash:c:train=0.7,test=0.3", "rows:train=0.5,test=0.5", "time:t:train=0.5,test=0.5"])
    summary = accounted(made, files, folder / "out", split=split, threads=chance.choice([1, 3]), **options)
    if summary is not None and seed % 5 == 0:
        fitted = FittedEtl.load(folder / "out" / "etl.zip")
        again = fitted.transform(files, folder / "again", on_bad_row="reject", overwrite=True)
        assert again.rows_in == again.rejected + again.filtered + sum(again.rows.values()) == summary.rows_in
    return rows * len(files)


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_are_rows_out_and_rejects(tmp_path: Path, monkeypatch: Any, seed: int) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 700)
    fuzz(tmp_path, seed, 100)


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [300, 5000, 8 << 20])
def test_ten_thousand_mutated_rows(tmp_path: Path, monkeypatch: Any, block_bytes: int) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    total = seed = 0
    while total < 10_000:
        engine: dict[str, Any] = {"engine": "gpu", "device": "cpu"} if seed % 6 == 5 else {}
        total += fuzz(tmp_path / str(seed), seed + block_bytes, 120, **engine)
        seed += 1


def test_a_fuzzed_file_becomes_sequences_without_losing_a_row(tmp_path: Path) -> None:
    raw = fuzzed(random.Random(7), tmp_path, {}, 150)
    grouping = SequenceConfig(
        input={"columns": COLUMNS, "header": False}, by="c", order_by="t",
        columns=[{"name": "xs", "source": "x", "last": 9}, {"name": "count", "source": "y", "take": "count"}],
        filters=[{"column": "y", "keep": "<=", "value": 1}],
    )  # fmt: skip
    summary = sequences(grouping, raw, tmp_path / "out", on_bad_row="reject")
    every = [gzip.decompress(one.read_bytes()) if one.suffix == ".gz" else one.read_bytes() for one in raw]
    assert summary.rows_in == sum(num_rows(data) for data in every)
    rejects = (tmp_path / "out/_rejects.jsonl").read_text().splitlines()
    assert len(rejects) == summary.rejected
    counted = sum(pq.ParquetFile(tmp_path / "out/part-00000.parquet").read().column("count").to_pylist())
    assert summary.rows_in >= summary.rejected + summary.filtered + summary.no_key + counted


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_number_that_only_learned_statistics_make_too_large_is_named_by_its_line(tmp_path: Path, kind: str) -> None:
    """Rows that were not trained on may lie any number of standard deviations away."""
    values = [1e-30, 2e-30] * 10 + [1e20, 1e-30]
    settings = config(
        [{"name": "y", "type": "int"}, {"name": "x", "type": "float"}],
        labels=[{"name": "y"}], dense=[{"name": "x", "operators": [STANDARD]}],
    )  # fmt: skip
    raw, place = tmp_path / f"raw.{kind}", "row 21"
    if kind == "csv":  # the header, a malformed line, and the twenty before
        lines = ["y,x", "1,pen", *(f"{n % 2},{value}" for n, value in enumerate(values))]
        raw.write_text("\n".join(lines) + "\n")
        place = "line 23"
    else:
        pq.write_table(pa.table({"y": [n % 2 for n in range(len(values))], "x": values}), raw)
    with pytest.raises(DataError, match=rf"does not fit float32[\s\S]*raw\.{kind}, {place}, column 'x'[\s\S]*1e\+20"):
        run(settings, raw, tmp_path / "out", on_bad_row="reject", split="rows:train=0.85,valid=0.15")
    assert not (tmp_path / "out").exists()
