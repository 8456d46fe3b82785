"""List columns in the operators that take them value by value: crosses, parts of dates, indicators, keys, numbers."""

import hashlib
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import config, read, text

from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset
from viviane.etl import EtlConfig, FittedEtl, run

COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"}, {"name": "u"}, {"name": "a", "list": True},
    {"name": "b", "type": "int", "list": True}, {"name": "x", "type": "float", "list": True},
    {"name": "t", "type": "timestamp", "list": True}, {"name": "i", "type": "int"},
]  # fmt: skip
_WORD = st.one_of(st.none(), st.sampled_from(["a", "b", "é", "1:a", "中"]))
_INT = st.one_of(st.none(), st.integers(-2, 12))
_PAIRS = st.lists(st.tuples(_WORD, _INT), max_size=4)
_ROWS = st.lists(st.tuples(st.integers(0, 1), _WORD, _PAIRS, st.sampled_from("  ab")), min_size=1, max_size=25)


def lists(*derivations: dict[str, Any], categorical: Any = ({"name": "u"},), **rest: Any) -> EtlConfig:
    return config(COLUMNS, labels=[{"name": "y"}], derived=derivations, categorical=categorical, **rest)


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    """Rows of label, word, pairs of word and number, and which of the two lists is missing."""
    words = [None if lost == "a" else [word for word, _ in pairs] for _, _, pairs, lost in rows]
    numbers = [None if lost == "b" else [number for _, number in pairs] for _, _, pairs, lost in rows]
    return pa.table(
        {
            "y": pa.array([row[0] for row in rows], pa.int64()), "u": pa.array([row[1] for row in rows], pa.string()),
            "a": pa.array(words, pa.list_(pa.string())), "b": pa.array(numbers, pa.list_(pa.int64())),
        }
    )  # fmt: skip


def by_hand(*parts: Any) -> int:
    """Id of a tuple: 3 + hash mod 97, 1 where a part is missing."""
    if any(part is None for part in parts):
        return 1
    key = "".join(f"{len(str(part))}:{part}" for part in parts)
    return 3 + int(hashlib.md5(key.encode()).hexdigest()[:15], 16) % 97


@settings(max_examples=8, deadline=None)
@given(rows=_ROWS)
def test_crosses_of_lists_value_by_value(rows: list[tuple[Any, ...]]) -> None:
    to_hash = {"type": "hash", "num_ids": 100}
    made = lists(
        categorical=[
            {"name": "one", "source": ["u", "a"], "kind": "multi_hot", "encoding": to_hash},
            {"name": "two", "source": ["a", "b", "u"], "kind": "multi_hot", "encoding": to_hash},
            {"name": "last", "source": ["b", "a"], "kind": "sequence", "max_length": 2, "encoding": to_hash},
            {"name": "known", "source": ["a", "b"], "kind": "multi_hot"},
        ]
    )
    table = table_of(rows)
    with tempfile.TemporaryDirectory() as name:
        pq.write_table(table, Path(name) / "raw.parquet")
        run(made, Path(name) / "raw.parquet", Path(name) / "out")
        found = read(Path(name) / "out/train")
        Dataset(Path(name) / "out/train").check()
        later = FittedEtl.load(Path(name) / "out/etl.zip").transform_table(table).to_pydict()
    for at, (_, user, pairs, lost) in enumerate(rows):
        whole = [1] if lost in "ab" else None
        words = [1] if lost == "a" else [by_hand(user, word) for word, _ in pairs]
        assert found["one"][at] == words
        assert found["two"][at] == (whole or [by_hand(word, number, user) for word, number in pairs])
        assert found["last"][at] == (whole or [by_hand(number, word) for word, number in pairs][-2:])
    pairs = [one for _, _, some, lost in rows if lost == " " for one in some if None not in one]
    counts = pd.Series([f"{len(w)}:{w}{len(str(n))}:{n}" for w, n in pairs], dtype=object).value_counts()
    ranked = sorted(counts.items(), key=lambda one: (-one[1], str(one[0]).encode()))
    ids = {key: 3 + place for place, (key, _) in enumerate(ranked)}
    for at, (_, _, some, lost) in enumerate(rows):
        wanted = [1 if None in (w, n) else ids.get(f"{len(w)}:{w}{len(str(n))}:{n}", 0) for w, n in some]
        assert found["known"][at] == ([1] if lost in "ab" else wanted)
    assert all(later[name] == found[name] for name in ("one", "two", "last", "known"))


def test_weights_of_a_cross_and_maps_in_it(tmp_path: Path) -> None:
    made = lists(
        {"type": "map", "name": "brand", "source": "a", "values": {"pen": "bic", "ink": "bic"}},
        categorical=[{"name": "ub", "source": ["u", "brand"], "kind": "multi_hot", "weights": "x"}],
    )
    rows = {"y": [1, 0], "u": ["ann", "bob"], "a": [["pen", "ink", "cup"], None], "x": [[1.0, 2.0, 0.5], None]}
    pq.write_table(pa.table(rows), tmp_path / "raw.parquet")
    run(made, tmp_path / "raw.parquet", tmp_path / "out")
    assert read(tmp_path / "out/train")["ub"] == [[3, 3, 4], [1]]
    assert read(tmp_path / "out/train")["x"] == [[1.0, 2.0, 0.5], [1.0]]


def test_crossed_lists_of_other_lengths_are_malformed_rows(tmp_path: Path) -> None:
    made = lists(categorical=[{"name": "ab", "source": ["a", "b"], "kind": "multi_hot"}])
    table = pa.table({"y": [1, 0], "u": ["a", "b"], "a": [["p"], ["p", "q"]], "b": [[1], [2]]})
    pq.write_table(table, tmp_path / "raw.parquet")
    with pytest.raises(DataError, match="not as many values as 'a', which 'ab' crosses it with") as caught:
        run(made, tmp_path / "raw.parquet", tmp_path / "out")
    assert "raw.parquet, row 2, column 'b'" in str(caught.value)
    assert run(made, tmp_path / "raw.parquet", tmp_path / "out", on_bad_row="reject").rejected == 1


def test_parts_of_dates_and_indicators_of_every_element(tmp_path: Path) -> None:
    moments = [[datetime(2024, 2, 29, 5), None], [], None, [datetime(1969, 12, 31, 23)]]
    numbers = [[0, 3600], [None], None, []]
    fill, third = {"type": "fill", "value": 9}, [[0.5, None], [None, None], None, [1.0, 2.0]]
    made = lists(
        {"type": "date_part", "name": "hour", "source": "t", "part": "hour"},
        {"type": "date_part", "name": "weekday", "source": "t", "part": "weekday"},
        {"type": "date_part", "name": "hour_b", "source": "b", "part": "hour", "unit": "s"},
        {"type": "missing_indicator", "name": "lost", "source": "x", "elements": True},
        {"type": "missing_indicator", "name": "no_x", "source": "x"},
        dense=[
            {"name": "lost", "dim": 2, "operators": [fill]}, {"name": "x", "dim": 2, "operators": [fill]},
            {"name": "no_x"},
        ],
        categorical=[
            {"name": name, "kind": "multi_hot", "encoding": {"type": "raw", "missing": -1}}
            for name in ("hour", "weekday", "hour_b")
        ],
    )  # fmt: skip
    table = pa.table(
        {"y": [0, 1, 0, 1], "t": pa.array(moments, pa.list_(pa.timestamp("us"))), "b": numbers, "x": third}
    )
    pq.write_table(table, tmp_path / "raw.parquet")
    run(made, tmp_path / "raw.parquet", tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found["hour"] == [[5, -1], [], [-1], [23]]
    assert found["weekday"] == [[3, -1], [], [-1], [2]]  # a Thursday and a Wednesday
    assert found["hour_b"] == [[0, 1], [-1], [-1], []]
    assert found["lost"] == [[0, 1], [1, 1], [9, 9], [0, 0]]
    assert found["x"] == [[0.5, 9], [9, 9], [9, 9], [1, 2]]
    assert found["no_x"] == [0, 0, 1, 0]
    again = FittedEtl.load(tmp_path / "out/etl.zip")
    assert again.transform_table(table)["hour"].to_pylist() == found["hour"]
    with pytest.raises(DataError, match="not 2 numbers"):
        again.transform_table(table.slice(0, 1).set_column(3, "x", pa.array([[1.0]])))


def test_text_that_holds_times(tmp_path: Path) -> None:
    columns: list[dict[str, Any]] = [{"name": "y", "type": "int"}, {"name": "t", "type": "timestamp", "separator": "|"}]
    made = config(
        columns, labels=[{"name": "y"}], derived=[{"type": "date_part", "name": "d", "source": "t", "part": "day"}],
        categorical=[{"name": "d", "kind": "multi_hot"}], ignored=["t"],
    )  # fmt: skip
    run(made, text(tmp_path / "raw.csv", "y,t\n1,2024-01-05 00:00:00|2024-01-06\n0,\n1,2024-02-05\n"), tmp_path / "out")
    assert read(tmp_path / "out/train")["d"] == [[3, 4], [1], [3]]


@settings(max_examples=6, deadline=None)
@given(rows=_ROWS)
def test_keys_of_a_list_and_single_values_and_statistics_of_lists(rows: list[tuple[Any, ...]]) -> None:
    made = lists(
        {"type": "count", "name": "n", "by": ["u", "a"]},
        {"type": "group_statistics", "name": "s", "by": "u", "of": "b", "statistics": ["count", "sum", "max"]},
        dense=[{"name": one, "operators": [{"type": "fill", "value": -7}]} for one in ("n", "s_b_sum", "s_b_max")],
    )
    table = table_of(rows)
    with tempfile.TemporaryDirectory() as name:
        pq.write_table(table, Path(name) / "raw.parquet")
        run(made, Path(name) / "raw.parquet", Path(name) / "out")
        found = read(Path(name) / "out/train")
    frame = pd.DataFrame({name: table[name].to_pylist() for name in ("u", "a", "b")})
    keys = frame[["u", "a"]].explode("a").dropna().groupby(["u", "a"]).size()
    numbers = frame[["u", "b"]].explode("b").dropna().astype({"b": float}).groupby("u")["b"]
    sums, most = numbers.sum(), numbers.max()
    for at, (user, words) in enumerate(zip(frame["u"], frame["a"], strict=True)):
        counts = [float(keys.get((user, word), 0)) for word in words or [] if word is not None and user is not None]
        np.testing.assert_allclose(found["n"][at], np.mean(counts) if counts else 0.0, rtol=3e-7)  # float32
        assert found["s_b_sum"][at] == sums.get(user, 0.0)
        assert found["s_b_max"][at] == most.get(user, -7.0)


@pytest.mark.parametrize(
    ("derivation", "message"),
    [
        (
            {"type": "difference_lag", "name": "n", "source": "b", "by": "u", "order_by": "i"},
            "'b' is a list, and a value of a list has no earlier row",
        ),
        (
            {"type": "difference_lag", "name": "n", "source": "i", "by": "a", "order_by": "i"},
            "key column 'a' is a list, so a row has several keys",
        ),
        ({"type": "count", "name": "n", "by": ["a", "b"]}, "several columns of the key are lists"),
        ({"type": "group_statistics", "name": "n", "by": "a", "of": "b"}, "are both lists"),
        ({"type": "missing_indicator", "name": "n", "source": "i", "elements": True}, "'i' is no list"),
    ],
)
def test_what_lists_cannot_be_used_for_says_why(derivation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lists(derivation)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"name": "c", "source": ["u", "a"]}, "'a' is a list: make it multi_hot"),
        ({"name": "c", "source": ["u", "i"], "kind": "multi_hot"}, "each of its columns is a single value"),
        ({"name": "c", "source": ["a", "h"], "kind": "multi_hot"}, "how long those of 'h' are is not known"),
        (
            {"name": "c", "source": ["a", "b"], "kind": "multi_hot", "operators": [{"type": "log"}]},
            "is a tuple, which operators and bucketize do not compute with",
        ),
        ({"name": "h", "kind": "multi_hot", "hotness": 3}, "'h' is a history, which begins empty"),
        ({"name": "a", "kind": "sequence", "max_length": 2, "hotness": 3}, "hotness 3 above max_length 2"),
        ({"name": "u", "hotness": 3}, "takes neither max_length nor hotness"),
    ],
)
def test_columns_that_cannot_be(column: dict[str, Any], message: str) -> None:
    history = {"type": "history", "name": "h", "source": "i", "by": "u", "order_by": "i", "last": 3}
    with pytest.raises(ConfigError, match=message):
        lists(history, categorical=[column])
