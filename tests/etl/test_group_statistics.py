"""Medians and numbers of distinct values by key, against pandas: numbers beyond 2^53, text, lists, engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import config, data_bytes, read

from viviane.etl import EtlConfig, FittedEtl, group_fitting, run
from viviane.etl.groups import medians

COLUMNS: list[dict[str, Any]] = [
    {"name": "user"},
    {"name": "shop", "type": "int"},
    {"name": "item", "type": "int"},
    {"name": "word"},
    {"name": "code", "type": "hex"},
    {"name": "at", "type": "timestamp"},
    {"name": "price", "type": "float"},
    {"name": "prices", "type": "float", "list": True},
    {"name": "words", "list": True},
]
NUMBERS = ("item", "price", "prices")


def grouped(by: Any) -> EtlConfig:
    """Medians of numbers and distinct values of everything."""
    every = [column["name"] for column in COLUMNS if column["name"] not in ("user", "shop")]
    names = [f"m_{one}_median" for one in NUMBERS] + [f"d_{one}_nunique" for one in every]
    return config(
        COLUMNS,
        derived=[
            {"type": "group_statistics", "name": "m", "by": by, "of": NUMBERS, "statistics": ["median"]},
            {"type": "group_statistics", "name": "d", "by": by, "of": every, "statistics": ["nunique"]},
        ],
        dense=[{"name": f"{name}_", "source": name, "operators": [{"type": "fill", "value": -9}]} for name in names],
    )


def rows(num: int, seed: int) -> pa.Table:
    """Rows with missing values, neighbours beyond 2^53, zeros of both signs, NaN, empty and missing lists."""
    draw = np.random.default_rng(seed)

    def some(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([values[at] for at in draw.integers(0, len(values), num)], kind)

    return pa.table(
        {
            "user": some(["a", "b", "é", "", None], pa.string()),
            "shop": some([1, 2, None], pa.int64()),
            "item": some([2**53, 2**53 + 1, -(2**63), 2**63 - 1, 2**63 - 2, 3, None], pa.int64()),
            "word": some(["x", "X", "", "日本", "x ", None], pa.string()),
            "code": some(["0a", "A", "ffffffffffffffff", "fffffffffffffffe", None], pa.string()),
            "at": some([0, 1, 10**15, None], pa.timestamp("us")),
            "price": some([0.0, -0.0, 0.1, 1e300, float("nan"), None, 2.0, -5.0], pa.float64()),
            "prices": some([[], [1.0, 2.0], [2.0, None], None, [1e3]], pa.list_(pa.float64())),
            "words": some([[], ["x"], ["x", "y", "x"], [None], None], pa.list_(pa.string())),
        }
    )


def wanted(table: pa.Table, by: list[str]) -> dict[str, list[float]]:
    """The same by pandas: objects for whole numbers, so that no cell passes through a float."""
    frame = pd.DataFrame({name: pd.Series(table[name].to_pylist(), dtype=object) for name in table.column_names})
    frame = frame.replace({"user": {"": None}, "word": {"": None}})
    codes = [None if code is None else int(code, 16) for code in frame["code"]]
    frame["code"] = pd.Series(codes, dtype=object)
    known = frame[by].notna().all(axis=1)
    keys = pd.Series([tuple(row) for row in frame[by].itertuples(index=False)], dtype=object)
    found: dict[str, list[float]] = {}
    for name in table.column_names:
        if name in ("user", "shop"):
            continue
        flat = pd.DataFrame({"key": keys[known], "value": frame[name][known]}).explode("value").dropna()
        groups = flat.groupby("key")["value"]
        found[f"d_{name}_nunique_"] = [
            groups.nunique().get(key, 0) if ok else 0 for key, ok in zip(keys, known, strict=True)
        ]
        if name in NUMBERS:
            middle = flat.astype({"value": float}).groupby("key")["value"].median()
            found[f"m_{name}_median_"] = [
                middle.get(key, -9) if ok else -9 for key, ok in zip(keys, known, strict=True)
            ]
    return found


@pytest.mark.parametrize(("by", "at_once"), [(["user"], 1), (["user", "shop"], 7), (["user"], 1 << 24)])
def test_equal_to_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: list[str], at_once: int) -> None:
    monkeypatch.setattr(group_fitting, "_SORTED_AT_ONCE", at_once)  # one key at a time, some, all
    table = rows(60, at_once)
    table = table.set_column(6, "price", pa.array([x if x != 1e300 else 7.0 for x in table["price"].to_pylist()]))
    pq.write_table(table, tmp_path / "raw.parquet")
    run(grouped(by), tmp_path / "raw.parquet", tmp_path / "out")
    found = read(tmp_path / "out/train")
    for name, values in wanted(table, by).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)
    again = FittedEtl.load(tmp_path / "out/etl.zip").transform_table(table)
    assert again.to_pydict() == found


def test_engines_agree(tmp_path: Path) -> None:
    table = rows(300, 5).drop(["price"]).append_column("price", pa.array(np.arange(300) % 7 / 3))
    pq.write_table(table, tmp_path / "raw.parquet")
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(grouped(["user"]), tmp_path / "raw.parquet", tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.floats(allow_nan=False)), max_size=40),
)
def test_medians_are_those_of_numpy(pairs: list[tuple[int, float]]) -> None:
    at, x = np.array([key for key, _ in pairs], np.int64), np.array([number for _, number in pairs])
    found = medians(at, x, 5)
    for key in range(5):
        own = np.sort(x[at == key])
        if len(own) == 0:
            assert np.isnan(found[key])
            continue
        low, high = own[(len(own) - 1) // 2], own[len(own) // 2]
        expected = low if low == high else low / 2 + high / 2
        np.testing.assert_equal(found[key], expected)
        if max(abs(low), abs(high)) < 1e300:
            np.testing.assert_allclose(found[key], np.median(own), rtol=1e-15)


def test_only_distinct_values_are_counted_of_text() -> None:
    one = {"type": "group_statistics", "name": "g", "by": "user", "of": "word", "statistics": ["median", "nunique"]}
    with pytest.raises(ValueError, match=r"'g': column 'word' is of type string: median, nunique of it are undefined"):
        config(COLUMNS, derived=[one], categorical=[{"name": "user"}])
    with pytest.raises(ValueError, match="names a statistic twice"):
        config(COLUMNS, derived=[{**one, "statistics": ["nunique", "nunique"]}], categorical=[{"name": "user"}])
