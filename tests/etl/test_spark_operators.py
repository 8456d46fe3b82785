"""Spark against DuckDB, byte for byte: joins, list slices, given vocabularies, text labels, booleans, file names."""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import config, same_on_spark, text

from viviane.etl import EtlConfig, FittedEtl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("spark_session"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]
FILL = [{"type": "fill", "value": -7}]
# Spaces, quotes, a comma, a line break, words of missing values, unicode that is written in two ways, SQL.
NASTY = [
    "a",
    "A",
    " a",
    "é",
    "e\u0301",
    "日本",
    "NULL",
    "nan",
    "'; DROP",
    "x,y",
    'say "x"',
    "two\nlines",
    "\u200b",
    "0",
]


def cell(value: Any) -> str:
    return "" if value is None else '"' + str(value).replace('"', '""') + '"'


def write_rows(folder: Path) -> None:
    """Text, compressed text and Parquet with the same columns, in files with nasty names."""
    columns = ["label", "on", "user", "code", "tags", "time"]
    rows = []
    for n in range(211):
        word = NASTY[n * 7 % len(NASTY)]
        tags = None if n % 11 == 0 else "|".join(NASTY[(n + i) % 7] for i in range(n % 5))
        rows.append(
            {
                "label": ["yes", "No", "maybe", None][n % 4] if n % 4 < 3 else "yes",
                "on": [True, False, None][n % 3],
                "user": None if n % 13 == 0 else word,
                "code": f"{n * 2654435761 % 2**64:x}" if n % 9 else None,
                "tags": tags,
                "time": n // 3,
            }
        )
    parts = [rows[:90], rows[90:91], rows[91:170], rows[170:]]
    for name, part in zip(("one.csv", "b=2 [x].csv.gz", "é,c.csv"), parts, strict=False):
        content = ",".join(columns) + "\n" + "".join(",".join(cell(row[c]) for c in columns) + "\n" for row in part)
        data = content.encode()
        (folder / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith("gz") else data)
    pq.write_table(pa.Table.from_pylist(parts[3]), folder / "d.parquet")


def everything(folder: Path) -> EtlConfig:
    text(folder / "codes.txt", "a\nA\nb\n")
    pq.write_table(
        pa.table(
            {
                "who": ["a", "é", "日本", "e\u0301", "nobody"],
                "height": pa.array([1, 2**60, None, -5, 0]),
                "likes": pa.array([["a", None], [], None, ["'; DROP"], ["x"]], pa.list_(pa.string())),
            }
        ),
        folder / "users.parquet",
    )
    columns = [
        {"name": "label"}, {"name": "on", "type": "bool"}, {"name": "user"}, {"name": "code", "type": "hex"},
        {"name": "tags", "separator": "|"}, {"name": "time", "type": "int"}, {"name": "file"},
    ]  # fmt: skip
    join = {"type": "join", "name": "u", "by": "user", "on": "who", "file": str(folder / "users.parquet"),
            "input": {"columns": [{"name": "who"}, {"name": "height", "type": "int"},
                                  {"name": "likes", "list": True}]}}  # fmt: skip
    return config(
        columns,
        input={"file_name": "file", "quote": '"', "missing": ["NULL"]},
        min_cardinality=3,
        labels=[{"name": "label", "positive": ["yes"], "negative": ["No", "maybe"]}],
        derived=[
            join,
            {"type": "list_slice", "name": "ends", "source": "tags", "start": -3, "pad_to": 3},
            {"type": "list_slice", "name": "liked", "source": "u_likes", "start": 0, "end": 2},
            {"type": "lag", "name": "code_before", "source": "code", "by": "user", "order_by": "time"},
            {"type": "lead", "name": "on_after", "source": "on", "by": ["file", "user"], "order_by": "time"},
            {"type": "count", "name": "same_on", "by": "on"},
            {"type": "group_statistics", "name": "s", "by": "file", "of": ["on", "u_height", "code"],
             "statistics": ["nunique"]},
            {"type": "group_statistics", "name": "m", "by": "on", "of": "time", "statistics": ["median", "var", "std"]},
            {"type": "target_encode", "name": "rate", "by": "file", "target": "label", "folds": 2},
        ],
        dense=[
            {"name": name, "operators": FILL}
            for name in ("on", "u_height", "same_on", "s_on_nunique", "s_code_nunique", "m_time_median", "m_time_var",
                         "rate", "on_after")
        ],
        categorical=[
            {"name": "file"},
            {"name": "few", "source": "on"},
            {"name": "user", "encoding": {"type": "vocabulary", "values": NASTY[::2], "unknown_buckets": 2}},
            {"name": "tags", "kind": "multi_hot",
             "encoding": {"type": "vocabulary", "file": str(folder / "codes.txt")}},
            {"name": "ends", "kind": "sequence", "max_length": 3},
            {"name": "liked", "kind": "multi_hot"},
            {"name": "code_before", "encoding": {"type": "raw", "missing": -1}, "dtype": "int64"},
            {"name": "cross", "source": ["on", "u_height", "file"]},
        ],
    )  # fmt: skip


@pytest.mark.parametrize("split", [None, "hash:code:train=0.6,valid=0.4", "rows:train=0.5,test=0.5"], ids=str)
def test_the_same_byte_for_byte(tmp_path: Path, split: str | None) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_rows(raw)
    files = sorted(raw.iterdir())
    summary, _ = same_on_spark(everything(tmp_path), files, tmp_path, split=split, threads=2, on_bad_row="reject")
    assert "few" in summary.dropped
    fitted = FittedEtl.load(tmp_path / "spark" / "etl.zip")
    same_on_spark(fitted, files, tmp_path / "applied", on_bad_row="reject")


def test_workers_run_the_interpreter_of_the_command(tmp_path: Path) -> None:
    """Spark takes any python3 that it finds, which need not have this package."""
    text(tmp_path / "raw.csv", "click,item\n1,a\n0,b\n1,a\n")
    text(
        tmp_path / "etl.json",
        '{"input": {"columns": [{"name": "click", "type": "int"}, {"name": "item"}]}, "labels": [{"name": "click"}], '
        '"categorical": [{"name": "item"}]}',
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    command = [sys.executable, "-m", "viviane", "etl", "raw.csv", "--config", "etl.json", "--output", "out"]
    done = subprocess.run(
        [*command, "--engine", "spark", "--master", "local[1]"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
