"""Counts, statistics and target encodings by the values of a list column, against pandas' explode."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import config, read

from viviane.etl import FittedEtl, run
from viviane.etl.folds import fold_of

COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"}, {"name": "l", "list": True}, {"name": "x", "type": "float"},
    {"name": "part", "type": "int"},
]  # fmt: skip
_WORD = st.one_of(st.none(), st.sampled_from(["a", "b", "é", "中"]))
_ROWS = st.lists(
    st.tuples(
        st.integers(0, 1), st.one_of(st.none(), st.lists(_WORD, max_size=4)),
        st.one_of(st.none(), st.integers(-9, 9).map(float)), st.integers(0, 1),
    ),
    min_size=1, max_size=25,
).filter(lambda rows: any(row[3] == 0 for row in rows))  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(rows=_ROWS)
def test_means_over_the_values_of_a_row(rows: list[tuple[Any, ...]]) -> None:
    kinds: list[pa.DataType] = [pa.int64(), pa.list_(pa.string()), pa.float64(), pa.int64()]
    cells = zip(*rows, strict=True)
    table = pa.table({c["name"]: pa.array(one, k) for c, one, k in zip(COLUMNS, cells, kinds, strict=True)})
    settings_ = config(
        COLUMNS,
        labels=[{"name": "y"}],
        derived=[
            {"type": "count", "name": "n", "by": "l"},
            {"type": "group_statistics", "name": "s", "by": "l", "of": "x", "statistics": ["mean", "max"]},
            {"type": "target_encode", "name": "te", "by": "l", "target": "y", "folds": 3, "smoothing": 2},
        ],
        dense=[
            {"name": name, "operators": [{"type": "fill", "value": -7}]} for name in ("n", "s_x_mean", "s_x_max", "te")
        ],
        ignored=["part"],
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table, folder / "raw.parquet")
        run(settings_, folder / "raw.parquet", folder / "out", split="time:part:test@1")
        found = {part: read(folder / "out" / part) for part in ("train", "test")}
        later = FittedEtl.load(folder / "out/etl.zip").transform_table(table).to_pydict()

    frame = table.to_pandas().assign(row=range(len(rows)), fold=fold_of(np.arange(len(rows), dtype=np.uint64), 3, 0))
    frame["l"] = table["l"].to_pylist()
    long = frame[[bool(one) for one in frame["l"]]].explode("l")  # a row for each value; none of an empty list
    train = long[long["part"] == 0]
    groups = train.dropna(subset=["l"]).groupby("l")
    count, mean, most = groups.size(), groups["x"].mean(), groups["x"].max()

    def encoded(key: Any, some: pd.DataFrame) -> float:
        prior = float(some["y"].mean()) if len(some) else 0.0
        same = some[some["l"] == key]
        return (float(same["y"].sum()) + 2 * prior) / (len(same) + 2)

    def of_row(row: Any, fold: int | None) -> list[float]:
        values = [one for one in row["l"] or [] if one is not None]
        some = train if fold is None else train[train["fold"] != fold]
        if not values:
            return [0.0, -7.0, -7.0, (float(some["y"].mean()) if len(some) else 0.0)]
        made = [np.mean([float(count.get(one, 0)) for one in values])]
        for statistic in (mean, most):
            numbers = [statistic.get(one, np.nan) for one in values]
            numbers = [one for one in numbers if not np.isnan(one)]
            made.append(np.mean(numbers) if numbers else -7.0)
        return [*made, np.mean([encoded(one, some) for one in values])]

    names = ["n", "s_x_mean", "s_x_max", "te"]
    for part, number in (("train", 0), ("test", 1)):
        rows_of = [row for _, row in frame[frame["part"] == number].iterrows()]
        wanted = [of_row(row, int(row["fold"]) if part == "train" else None) for row in rows_of]
        got = list(zip(*(found[part][one] for one in names), strict=True))
        # float32 keeps 24 bits
        np.testing.assert_allclose(np.reshape(got, (-1, 4)), np.reshape(wanted, (-1, 4)), rtol=3e-7, atol=1e-6)
    wanted = [of_row(row, None) for _, row in frame.iterrows()]
    np.testing.assert_allclose(list(zip(*(later[one] for one in names), strict=True)), wanted, rtol=3e-7, atol=1e-6)
