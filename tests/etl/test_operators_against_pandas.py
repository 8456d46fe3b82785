"""Every operator and encoding on generated frames, against pandas and numpy in float64; odd files."""

import hashlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import clicks, config, read, text

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, run

COLUMNS: list[dict[str, Any]] = [
    {"name": "x", "type": "float"},
    {"name": "n", "type": "int"},
    {"name": "s"},
    {"name": "r"},
    {"name": "l", "list": True},
    {"name": "xs", "type": "float", "list": True},
    {"name": "part", "type": "int"},
]
FILL = {"type": "fill", "value": -9}
DENSE: dict[str, list[dict[str, Any]]] = {
    "fill": [FILL],
    "clip": [{"type": "clip", "min": -2, "max": 3}, FILL],
    "log": [{"type": "log"}, FILL],
    "log_square": [{"type": "log_square"}, FILL],
    "standardize": [{"type": "fill", "value": 1}, {"type": "standardize"}],
    "min_max": [{"type": "fill", "value": 1}, {"type": "min_max"}],
    "threshold": [FILL, {"type": "threshold", "at": 2}],
    "mean": [{"type": "fill", "value": 0}, {"type": "log"}, {"type": "standardize"}, {"type": "clip", "max": 1}],
}


def every_operator() -> EtlConfig:
    borders = {"type": "bucketize", "borders": [-1.5, 0, 2]}
    some = {"type": "categorify", "min_count": 2, "unknown_buckets": 3}
    by_hash, log, bag = {"type": "hash", "num_ids": 50}, [{"type": "log"}], {"kind": "multi_hot"}
    return config(
        COLUMNS,
        derived=[{"type": "missing_indicator", "name": "no_x", "source": "x"}],
        dense=[
            *({"name": name, "source": "x", "operators": operators} for name, operators in DENSE.items()),
            {"name": "no_x"},
        ],
        categorical=[
            {"name": "s", "encoding": {"type": "categorify", "min_count": 2}},
            {"name": "top", "source": "s", "encoding": {"type": "categorify", "max_values": 2}},
            {"name": "joint_s", "source": "s", "vocabulary": "joint"},
            {"name": "joint_r", "source": "r", "vocabulary": "joint"},
            {"name": "joint_l", "source": "l", "vocabulary": "joint", "kind": "multi_hot"},
            {"name": "buckets", "source": "r", "encoding": some},
            {"name": "list_buckets", "source": "l", "encoding": some, **bag},
            {"name": "hash", "source": "s", "encoding": by_hash},
            {"name": "list_hash", "source": "l", "kind": "multi_hot", "encoding": by_hash},
            {"name": "cross", "source": ["s", "n"], "encoding": {"type": "hash", "num_ids": 1000}},
            {"name": "bucket", "source": "x", "encoding": borders},
            {"name": "list_bucket", "source": "xs", "kind": "multi_hot", "encoding": borders},
            {"name": "logged", "source": "xs", "operators": log, "encoding": borders, **bag},
            {"name": "last", "source": "l", "kind": "sequence", "max_length": 2, "encoding": by_hash},
        ],
        ignored=["part"],
    )  # fmt: skip


def dense_by_hand(name: str, x: pd.Series, train: pd.Series) -> Any:
    filled, base = x.fillna(1), train.fillna(1)
    log = np.log1p(x.clip(lower=0))
    zeros, train_zeros = (np.log1p(one.fillna(0).clip(lower=0)) for one in (x, train))
    square = np.where(x > 2, np.floor(np.log(x.clip(lower=2)) ** 2), np.floor(x))
    return {
        "fill": x.fillna(-9),
        "clip": x.clip(-2, 3).fillna(-9),
        "log": log.fillna(-9),
        "log_square": pd.Series(square).where(x.notna(), -9),
        "threshold": (x.fillna(-9) >= 2).astype(float),
        "mean": ((zeros - train_zeros.mean()) / (train_zeros.std(ddof=0) or 1)).clip(upper=1),
        "standardize": (filled - base.mean()) / (base.std(ddof=0) or 1),
        "min_max": ((filled - base.min()) / ((base.max() - base.min()) or 1)).clip(0, 1),
    }[name]


def numbered(values: list[str], **settings_: int) -> dict[str, int]:
    """Ids from 3 on, by falling count, ties by the bytes of the value."""
    counts = Counter(values)
    kept = [v for v in counts if counts[v] >= settings_.get("min_count", 1)]
    kept.sort(key=lambda v: (-counts[v], v.encode()))
    return {v: 3 + place for place, v in enumerate(kept[: settings_.get("max_values")])}


def hashed(value: str, num: int) -> int:
    return int(hashlib.md5(value.encode()).hexdigest()[:15], 16) % num


def flat(lists: list[Any]) -> list[Any]:
    return [one for values in lists for one in (values if values is not None else []) if one is not None]


_WORD = st.one_of(st.none(), st.sampled_from(["a", "b", "é", "中文", "1:a", "A", "\N{GRINNING FACE}"]))
# Whole quarters: sums of them have no rounding, so that a constant column has the deviation 0 in any order of adding.
_NUMBER = st.one_of(st.none(), st.integers(-40, 40).map(lambda one: one / 4))
_ROWS = st.lists(
    st.tuples(
        _NUMBER, st.one_of(st.none(), st.integers(-2, 2)), _WORD, _WORD,
        st.one_of(st.none(), st.lists(_WORD, max_size=4)),
        st.one_of(st.none(), st.lists(_NUMBER, max_size=3)), st.integers(0, 1),
    ),
    min_size=1, max_size=30,
).filter(lambda rows: any(row[6] == 0 for row in rows))  # fmt: skip


@settings(max_examples=4, deadline=None)
@given(rows=_ROWS)
def test_every_operator(rows: list[tuple[Any, ...]]) -> None:
    text_, number = pa.string(), pa.float64()
    kinds: list[pa.DataType] = [number, pa.int64(), text_, text_, pa.list_(text_), pa.list_(number), pa.int64()]
    cells = zip(*rows, strict=True)
    table = pa.table({c["name"]: pa.array(one, k) for c, one, k in zip(COLUMNS, cells, kinds, strict=True)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table.slice(0, 0), folder / "empty.parquet")
        pq.write_table(table, folder / "raw.parquet")
        files = [folder / "empty.parquet", folder / "raw.parquet"]
        run(every_operator(), files, folder / "out", split="time:part:test@1")
        parts = [read(folder / "out" / part) for part in ("train", "test")]
    ordered = [row for row in rows if row[6] == 0] + [row for row in rows if row[6] == 1]
    got = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    train = [row for row in rows if row[6] == 0]
    x, x_train = (pd.Series([row[0] for row in some], dtype=float) for some in (ordered, train))
    for name in DENSE:
        # float32 keeps 24 bits; log_square floors, and its squares of logarithms are never whole numbers here
        np.testing.assert_allclose(got[name], dense_by_hand(name, x, x_train), rtol=3e-7, atol=1e-6, err_msg=name)
    assert got["no_x"] == [float(row[0] is None) for row in ordered]

    s, r, lists = ([row[at] for row in ordered] for at in (2, 3, 4))
    s_train, r_train, l_train = ([one for one in (row[at] for row in train) if one is not None] for at in (2, 3, 4))
    several = numbered(s_train, min_count=2)
    assert got["s"] == [1 if v is None else several.get(v, 2) for v in s]
    top = numbered(s_train, max_values=2)
    assert got["top"] == [1 if v is None else top.get(v, 2) for v in s]
    joint = numbered(s_train + r_train + flat(l_train))
    assert got["joint_s"] == [1 if v is None else joint.get(v, 2) for v in s]
    assert got["joint_r"] == [1 if v is None else joint.get(v, 2) for v in r]
    whole = [[None] if values is None else values for values in lists]
    assert got["joint_l"] == [[1 if v is None else joint.get(v, 2) for v in values] for values in whole]

    def bucketed(known: dict[str, int], v: str | None) -> int:
        return 1 if v is None else known.get(v, 3 + len(known) + hashed(v, 3))

    known = numbered(r_train, min_count=2)
    assert got["buckets"] == [bucketed(known, v) for v in r]
    known = numbered(flat(l_train), min_count=2)
    assert got["list_buckets"] == [[bucketed(known, v) for v in values] for values in whole]
    assert got["hash"] == [1 if v is None else 3 + hashed(v, 47) for v in s]
    by_hash = [[1 if v is None else 3 + hashed(v, 47) for v in values] for values in whole]
    assert got["list_hash"] == by_hash
    assert got["last"] == [values[-2:] for values in by_hash]
    tuples = [(v, None if row[1] is None else str(row[1])) for v, row in zip(s, ordered, strict=True)]
    texts = [None if None in one else "".join(f"{len(v)}:{v}" for v in one if v is not None) for one in tuples]
    assert got["cross"] == [1 if one is None else 3 + hashed(one, 997) for one in texts]

    def border(value: float | None) -> int:
        return 1 if value is None else 3 + sum(value >= one for one in (-1.5, 0, 2))

    assert got["bucket"] == [border(row[0]) for row in ordered]
    vectors = [[None] if row[5] is None else row[5] for row in ordered]
    assert got["list_bucket"] == [[border(v) for v in values] for values in vectors]
    logs = [[None if v is None else float(np.log1p(max(v, 0.0))) for v in values] for values in vectors]
    assert got["logged"] == [[border(v) for v in values] for values in logs]


def test_one_row_and_empty_files(tmp_path: Path) -> None:
    empty, header = text(tmp_path / "a.csv", ""), text(tmp_path / "b.csv", "click,item\n")
    raw = text(tmp_path / "c.csv", "click,item\n1,é\n")
    assert run(clicks(), [header, raw], tmp_path / "out").rows == {"train": 1}
    assert read(tmp_path / "out/train") == {"click": [1.0], "item": [3]}
    with pytest.raises(DataError, match="the file is empty"):
        run(clicks(), [raw, empty], tmp_path / "other")
    with pytest.raises(DataError, match=r"(?s)the input has no rows.*b\.csv"):
        run(clicks(), header, tmp_path / "none")


def test_duplicate_columns_are_refused(tmp_path: Path) -> None:
    twice = text(tmp_path / "raw.csv", "click,item,item\n1,a,b\n")
    with pytest.raises(DataError, match="a column occurs twice"):
        run(clicks(), twice, tmp_path / "out")
    table = pa.Table.from_arrays([pa.array([1]), pa.array(["a"]), pa.array(["b"])], names=["click", "item", "item"])
    pq.write_table(table, tmp_path / "raw.parquet")
    with pytest.raises(DataError, match="a column occurs twice"):
        run(clicks(), tmp_path / "raw.parquet", tmp_path / "out")
