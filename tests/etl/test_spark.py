"""Spark against DuckDB: the same output, byte for byte, of everything the ETL learns, splits, derives and writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import config, same_on_spark, text

from viviane.core.errors import ConfigError, DataError
from viviane.etl import EtlConfig, FittedEtl, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("spark_session"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]
COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"},
    {"name": "user"},
    {"name": "item", "type": "hex"},
    {"name": "num", "type": "int"},
    {"name": "x", "type": "float"},
    {"name": "t", "type": "timestamp"},
    {"name": "tags", "list": True},
    {"name": "nums", "type": "int", "list": True},
]
FILL = {"type": "fill", "value": 0.5}
WORDS = ["", "a", "A", "é", "日本", "z z", "\u200b", "1", "1.0", "-", "ß"]


def rows(num: int, seed: int, whole: bool) -> pa.Table:
    """Rows with nulls, unicode, zeros of both signs, NaN, whole numbers beyond 2^53, empty and missing lists."""
    rng = np.random.default_rng(seed)

    def some(values: list[Any], kind: pa.DataType) -> pa.Array:
        places = rng.integers(0, len(values) + 1, num)
        return pa.array([None if at == len(values) else values[at] for at in places], kind)

    numbers = [0, -1, 7, 2**62, -(2**62), 2**53 + 1, 3]
    floats = [0.0, -0.0, 0.1, 1e20, 1e-9, -3.5, float("nan"), 2.0]
    times = [0, -1, 86_399_999_999, 1_700_000_000_123_456, 1_700_000_000_000_000]
    lists = [[], ["a"], ["a", None, "é"], ["b", "a", "a"]]
    users = [word for word in WORDS if word]
    return pa.table(
        {
            "y": pa.array(rng.integers(0, 2, num)),
            "user": pa.array(rng.choice(users, num)) if whole else some(users, pa.string()),
            "item": some(["ff", "0", "ffffffffffffffff", "abc"], pa.string()),
            "num": some(numbers, pa.int64()),
            "x": some(floats, pa.float64()),
            "t": pa.array(rng.choice(times, num), pa.timestamp("us")),
            "tags": some(lists, pa.list_(pa.string())),
            "nums": some([[], [1], [1, 2, 2], [None]], pa.list_(pa.int64())),
        }
    )


def everything() -> EtlConfig:
    """A config with every operator that asks the engine."""
    return config(
        COLUMNS,
        labels=[{"name": "y"}],
        derived=[
            {"type": "difference_lag", "name": "lag", "source": "x", "by": "user", "order_by": "t"},
            {"type": "difference_lag", "name": "since", "source": "t", "by": ["user", "num"], "order_by": "t"},
            {"type": "lag", "name": "before", "source": "item", "by": "user", "order_by": "t"},
            {"type": "lead", "name": "after", "source": "user", "by": "num", "order_by": "x", "shift": 2},
            {"type": "count", "name": "times", "by": ["user", "num"]},
            {"type": "group_statistics", "name": "of", "by": "user", "of": "x", "statistics": ["std", "var", "median"]},
            {"type": "group_statistics", "name": "d", "by": ["user", "tags"], "of": "item", "statistics": ["nunique"]},
            {"type": "target_encode", "name": "rate", "by": "user", "target": "y", "folds": 3},
            {"type": "map", "name": "tags2", "source": "tags", "values": {"a": "x"}},
            {"type": "date_part", "name": "hours", "source": "nums", "part": "hour", "unit": "s"},
            {"type": "count", "name": "user_tag", "by": ["user", "tags"]},
            {"type": "group_statistics", "name": "all", "by": "user", "of": "nums", "statistics": ["sum", "nunique"]},
        ],
        dense=[
            {"name": "x", "operators": [FILL, {"type": "clip", "min": -5, "max": 5}, {"type": "standardize"}]},
            {"name": "n", "source": "num", "operators": [FILL, {"type": "log_square"}, {"type": "min_max"}]},
            {"name": "middle", "source": "x", "operators": [{"type": "fill", "value": "median"}]},
            *(
                {"name": name, "operators": [FILL]}
                for name in (
                    "lag", "since", "times", "of_x_std", "of_x_median", "d_item_nunique",
                    "rate", "user_tag", "all_nums_sum", "all_nums_nunique",
                )
            ),
        ],
        categorical=[
            {"name": "user", "vocabulary": "words", "encoding": {"type": "categorify", "min_count": 2}},
            {
                "name": "tags", "kind": "multi_hot", "vocabulary": "words", "max_length": 2,
                "encoding": {"type": "categorify", "min_count": 2},
            },
            {"name": "item", "encoding": {"type": "categorify", "max_values": 2, "unknown_buckets": 3}},
            {"name": "both", "source": ["user", "num"]},
            {"name": "before", "encoding": {"type": "raw", "missing": 0}},
            {"name": "after"},
            {"name": "pair", "source": ["item", "num"], "encoding": {"type": "categorify", "max_values": 9}},
            {"name": "level", "source": "x", "encoding": {"type": "bucketize", "quantiles": 5}},
            {"name": "hashed", "source": ["item", "user"], "encoding": {"type": "hash", "num_ids": 50}},
            {"name": "nums", "kind": "sequence", "max_length": 2},
            {"name": "hours", "kind": "multi_hot", "hotness": "auto"},
            {"name": "user_tags", "source": ["user", "tags"], "kind": "multi_hot"},
            {"name": "two_lists", "source": ["tags", "item", "tags2"], "kind": "multi_hot"},
        ],
    )  # fmt: skip


SPLITS = [
    None,
    "hash:user:train=0.6,valid=0.4",
    "time:t:train=0.7,test=0.3",
    "rows:train=0.5,valid=0.25,test=0.25",
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_everything_is_the_same_byte_for_byte(tmp_path: Path, split: str | None) -> None:
    for number, size in enumerate((700, 1, 0, 90)):
        pq.write_table(rows(size, number, split is not None), tmp_path / f"raw-{number}.parquet")
    same_on_spark(everything(), tmp_path / "raw-*.parquet", tmp_path, split=split, threads=2)


def test_many_shards_and_files_a_filter_and_a_fitted_etl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.etl.write.ROWS_PER_GROUP", 100)
    monkeypatch.setattr("viviane.etl.write.ROWS_PER_FILE", 200)
    lines = "".join(f"{n % 2},{n % 7},{n / 3}\n" for n in range(1000))
    text(tmp_path / "raw.csv", "click,item,x\n" + lines)
    made = config(
        [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "x", "type": "float"}],
        labels=[{"name": "click"}], dense=[{"name": "x"}], categorical=[{"name": "item"}],
        filters=[{"column": "x", "keep": ">", "value": 4.0}],
    )  # fmt: skip
    same_on_spark(made, tmp_path / "raw.csv", tmp_path, split="hash:item:train=0.7,test=0.3")
    fitted = FittedEtl.load(tmp_path / "spark" / "etl.zip")
    same_on_spark(fitted, tmp_path / "raw.csv", tmp_path / "applied")
    assert len(list((tmp_path / "applied" / "spark").glob("part-*.parquet"))) > 1


def test_errors_are_for_people(tmp_path: Path) -> None:
    text(tmp_path / "raw.csv", "click,item\n1,a\n0,b\n")
    made = config(
        [{"name": "click", "type": "int"}, {"name": "item"}], labels=[{"name": "click"}], categorical=[{"name": "item"}]
    )
    with pytest.raises(ConfigError, match="no such engine"):
        run(made, tmp_path / "raw.csv", tmp_path / "out", engine="polars")
    with pytest.raises(ConfigError, match="are Spark's"):
        run(made, tmp_path / "raw.csv", tmp_path / "out", master="local[2]")


def test_a_failed_task_names_what_happened() -> None:
    from viviane.etl.spark import SparkEngine

    engine = SparkEngine()

    def fail(item: int) -> int:
        raise OSError(f"no space on device for {item}")

    with pytest.raises(DataError, match="Spark failed"):
        list(engine.map(fail, [1, 2]))
    assert list(engine.map(lambda item: item * item, range(4))) == [0, 1, 4, 9]
