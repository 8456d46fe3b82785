"""Spark against DuckDB, byte for byte: splits, filters, numbers, histories, functions, rejects; equal errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from raw_files import config, same_on_spark, text

from viviane.core.errors import VivianeError
from viviane.etl import EtlConfig, FittedEtl, register_function, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("spark_session"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]
COLUMNS: list[dict[str, Any]] = [
    {"name": "day", "type": "int"},
    {"name": "at", "type": "timestamp"},
    {"name": "user"},
    {"name": "price", "type": "float"},
    {"name": "rating", "type": "float"},
    {"name": "prices", "type": "float", "list": True, "separator": "|"},
    {"name": "tags", "separator": "|"},
    {"name": "tag_weights", "type": "float", "list": True, "separator": "|"},
]


@register_function("spark_test_length")
def _length(values: pa.Array) -> pa.Array:
    return pc.utf8_length(pc.fill_null(values, "")).cast(pa.float64())


def raw_files(folder: Path, num: int = 400) -> list[Path]:
    """Three days, a file each, with an unusable row now and then."""
    noise = np.random.default_rng(5)
    files = []
    for day in range(3):
        lines = ["day,at,user,price,rating,prices,tags,tag_weights"]
        for n in range(num):
            price = noise.choice(["", f"{noise.lognormal(1, 2):.17g}", f"{-noise.random():.3g}", "0"])
            bad = day == 1 and n % 97 == 5
            many = int(noise.integers(0, 4))
            tags = "|".join(noise.choice(["a", "b", "\u65e5", ""], many))
            weights = "|".join(f"{noise.random():.4f}" for _ in range(many))
            rating, second = "five" if bad else noise.integers(1, 6), noise.choice(["", "2.5"])
            lines.append(
                f"{day},2024-01-0{day + 1} {n % 24:02}:00:00,u{noise.integers(0, 9)},{price},"
                f"{rating},{noise.random():.5f}|{second},{tags},{weights}"
            )
        files.append(text(folder / f"day_{day}.csv", "\n".join(lines) + "\n"))
    return files


def made(**more: Any) -> EtlConfig:
    fill = {"type": "fill", "value": "mean"}
    settings: dict[str, Any] = {
        "labels": [
            {"name": "liked", "source": "rating", "operators": [{"type": "threshold", "at": 4}]},
            {"name": "stars", "source": "rating", "task": "regression"},
        ],
        "derived": [
            {"type": "history", "name": "seen", "source": "tags0", "by": "user", "order_by": "at", "last": 3,
             "where": {"column": "rating", "keep": ">=", "value": 3}},
            {"type": "map", "name": "tags0", "source": "user", "values": {"u1": "one", "u2": "two"}},
            {"type": "missing_indicator", "name": "no_price", "source": "price"},
            {"type": "function", "name": "length", "source": "user", "function": "spark_test_length"},
            {"type": "date_part", "name": "hour", "source": "at", "part": "hour"},
        ],
        "dense": [
            {"name": "price", "operators": [fill, {"type": "log"}, {"type": "standardize"}]},
            {"name": "scaled", "source": "price", "operators": [fill, {"type": "min_max"}]},
            {"name": "prices", "dim": 2, "operators": [fill, {"type": "min_max"}]},
            {"name": "length"}, {"name": "no_price"}, {"name": "hour", "operators": [{"type": "clip", "max": 12}]},
        ],
        "categorical": [
            {"name": "user"},
            {"name": "seen", "kind": "sequence", "max_length": 3},
            {"name": "tags", "kind": "multi_hot", "max_length": 2, "keep": "first", "weights": "tag_weights"},
            {"name": "class", "source": "price", "operators": [{"type": "log_square"}]},
            {"name": "level", "source": "price", "encoding": {"type": "bucketize", "borders": [0.5, 3.0]}},
        ],
        "sample_weight": {"name": "w", "source": "rating"},
        "ignored": ["day"],
    }  # fmt: skip
    settings["derived"] = [settings["derived"][1], settings["derived"][0], *settings["derived"][2:]]
    return config(COLUMNS, **{**settings, **more})


@pytest.mark.parametrize(
    "split",
    [
        "file:train=day_0*,train=day_1*,test=day_2*",
        "time:at:valid@2024-01-02 12:00,test@2024-01-03",
        "time:day:train=0.6,test=0.4",
    ],
)
def test_splits_are_the_same_byte_for_byte(tmp_path: Path, split: str) -> None:
    files = raw_files(tmp_path)
    ours, _ = same_on_spark(made(), files, tmp_path, split=split, threads=2, on_bad_row="reject")
    assert len((tmp_path / "spark/rejects.jsonl").read_text().splitlines()) == ours.rejected > 5
    fitted = FittedEtl.load(tmp_path / "spark" / "etl.zip")
    same_on_spark(fitted, files, tmp_path / "applied", on_bad_row="reject")


def test_every_filter_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    files = raw_files(tmp_path, 200)
    filters = [
        {"column": "price", "keep": "present"},
        {"column": "user", "keep": "not in", "value": ["u0", "nobody"]},
        {"column": "user", "keep": "!=", "value": "u8"},
        {"column": "rating", "keep": "in", "value": [1, 2, 3, 5]},
        {"column": "price", "keep": "<=", "value": 1e4},
        {"column": "day", "keep": ">=", "value": 1},
    ]
    ours, _ = same_on_spark(made(filters=filters), files, tmp_path, threads=2, on_bad_row="reject")
    assert 0 < ours.filtered < ours.rows_in - ours.rejected
    missing = made(filters=[{"column": "price", "keep": "missing"}])
    everything_missing = missing.model_copy(update={"dense": missing.dense[2:], "categorical": missing.categorical[:3]})
    same_on_spark(everything_missing, files, tmp_path / "missing", on_bad_row="reject")


GOOD = "y,x,c\n1,1.5,a\n0,2,b\n"


@pytest.mark.parametrize(
    ("content", "more", "options"),
    [
        ("y,x,c\n1,1.5,a\n0,inf,b\n", {}, {}),
        ("y,x,c\n1,1.5,a\n2,1,b\n", {}, {}),
        ("y,x,c\n,1.5,a\n", {}, {"on_bad_row": "reject"}),
        ("y,x,c\n1,,a\n0,,b\n", {}, {}),
        ("y,x,c\n1,,a\n0,,b\n", {"dense": [{"name": "x", "operators": [{"type": "fill", "value": "mean"}]}]}, {}),
        (GOOD, {"filters": [{"column": "x", "keep": ">", "value": 9}]}, {}),
        (GOOD, {"min_cardinality": 5, "dense": []}, {}),
        (GOOD, {}, {"split": "rows:train=0.1,test=0.9"}),
        (GOOD, {}, {"split": "hash:nothing:train=0.5,test=0.5"}),
        (GOOD, {}, {"split": "file:train=nothing*;test=*"}),
        ("y,x,c\n1,1e40,a\n0,1,b\n", {}, {}),
        ("y,x\n1,1\n", {}, {}),
    ],
)
def test_errors_are_the_same(tmp_path: Path, content: str, more: dict[str, Any], options: dict[str, Any]) -> None:
    text(tmp_path / "raw.csv", content)
    columns = [{"name": "y", "type": "int"}, {"name": "x", "type": "float"}, {"name": "c"}]
    what: dict[str, Any] = {"labels": [{"name": "y"}], "dense": [{"name": "x"}], "categorical": [{"name": "c"}]}
    found = []
    for engine in ("duckdb", "spark"):
        with pytest.raises(VivianeError) as caught:
            run(config(columns, **{**what, **more}), tmp_path / "raw.csv", tmp_path / "out", engine=engine, **options)
        found.append((type(caught.value), str(caught.value)))
        assert not (tmp_path / "out").exists()
    assert found[0] == found[1]
