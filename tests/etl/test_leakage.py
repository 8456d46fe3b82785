"""Nothing that a row should not know reaches it: rows of one moment, its own label, over every border there is.

The truth is plain Python over the rows. Borders are those of pieces, staged shards, text blocks, files and folds.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raw_files import config, read

from viviane.core.errors import ConfigError
from viviane.etl import EtlConfig, derive, fit, run, sources
from viviane.etl.deriving import ROW, lag_build
from viviane.etl.engine import DuckDbEngine
from viviane.etl.folds import fold_of
from viviane.etl.history import HistoryMaker

Row = tuple[int, int, int, bool]  # key, time, value, counts
ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=40)


def histories(rows: list[Row], last: int) -> list[list[int]]:
    """The values that count of the key's rows at strictly earlier times, by time and then by row."""
    found = []
    for key, time, _, _ in rows:
        earlier = [(t, n, v) for n, (k, t, v, counts) in enumerate(rows) if k == key and t < time and counts]
        found.append([v for _, _, v in sorted(earlier)][-last:])
    return found


@settings(deadline=None, max_examples=200)
@given(rows=ROWS, last=st.integers(1, 4), cuts=st.lists(st.integers(0, 40), max_size=6))
@example(rows=[(0, 1, 7, True), (0, 2, 8, True), (0, 2, 9, True)], last=3, cuts=[1, 2])
@example(rows=[(0, 1, 7, True), (0, 1, 8, True), (0, 1, 9, True)], last=3, cuts=[1, 2])
@example(rows=[(0, 1, 7, True), (0, 2, 8, False), (0, 2, 9, True), (0, 3, 1, True)], last=2, cuts=[2, 3])
@example(rows=[(0, 1, 7, True), (1, 1, 8, True), (1, 1, 9, True)], last=2, cuts=[1])
def test_rows_of_one_moment_do_not_see_each_other_wherever_pieces_end(
    rows: list[Row], last: int, cuts: list[int]
) -> None:
    places = sorted(range(len(rows)), key=lambda n: (rows[n][0], rows[n][1], n))
    table = pa.table(
        {
            "known": pa.array([True] * len(rows)),
            "key0": pa.array([rows[n][0] for n in places], pa.int64()),
            "time": pa.array([rows[n][1] for n in places], pa.int64()),
            "row": pa.array(places, pa.int64()),
            "value": pa.array([rows[n][2] for n in places], pa.int64()),
            "counts": pa.array([rows[n][3] for n in places], pa.bool_()),
        }
    )
    maker = HistoryMaker(last, 1)
    borders = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    found: dict[int, list[int]] = {}
    for start, stop in pairwise(borders):
        piece = maker.add(table.slice(start, stop - start))
        found |= dict(zip(piece["row"].to_pylist(), piece["value"].to_pylist(), strict=True))
    assert [found[n] for n in range(len(rows))] == histories(rows, last)


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 9)), max_size=25), seed=st.integers()
)
def test_a_lag_looks_at_the_row_before_by_time_and_then_by_place(rows: list[tuple[int, int, int]], seed: int) -> None:
    """Rows of one time count in the order of the input, whatever order the engine meets them in."""
    order = np.random.default_rng(abs(seed)).permutation(len(rows))
    table = pa.table(
        {
            "k": pa.array([rows[n][0] for n in order], pa.int64()),
            "t": pa.array([rows[n][1] for n in order], pa.int64()),
            "x": pa.array([rows[n][2] for n in order], pa.int64()),
            ROW: pa.array(order, pa.int64()),
        }
    )
    found = _ENGINE.evaluate(table, lag_build(_lagging().derived[0]))  # type: ignore[arg-type]
    by_row = dict(zip(found["row"].to_pylist(), found["value"].to_pylist(), strict=True))
    for n, (key, time, x) in enumerate(rows):
        before = sorted((t, m) for m, (k, t, _) in enumerate(rows) if k == key and (t, m) < (time, n))
        assert by_row[n] == (x - rows[before[-1][1]][2] if before else None)


_ENGINE = DuckDbEngine()


def _lagging() -> EtlConfig:
    columns: list[dict[str, Any]] = [{"name": name, "type": "int"} for name in ("k", "t", "x")]
    return config(
        columns,
        derived=[{"type": "difference_lag", "name": "lag", "source": "x", "by": "k", "order_by": "t"}],
        dense=[{"name": "lag", "operators": [{"type": "fill", "value": 0}]}],
    )


def log(seed: int, count: int) -> dict[str, list[int]]:
    """Few keys and times, so that many rows share a moment; every value is its row's number."""
    chance = np.random.default_rng(seed)
    return {
        "y": chance.integers(0, 2, count).tolist(),
        "u": chance.integers(0, 3, count).tolist(),
        "t": (np.sort(chance.integers(0, count // 4, count)) if seed % 2 else chance.integers(0, 5, count)).tolist(),
        "n": list(range(count)),
    }


def whole() -> EtlConfig:
    columns: list[dict[str, Any]] = [{"name": name, "type": "int"} for name in ("y", "u", "t", "n")]
    return config(
        columns,
        derived=[
            {"type": "history", "name": "seen", "source": "n", "by": "u", "order_by": "t", "last": 4},
            {
                "type": "history", "name": "clicked", "source": "n", "by": "u", "order_by": "t", "last": 3,
                "where": {"column": "y", "keep": "==", "value": 1},
            },
            {"type": "difference_lag", "name": "lag", "source": "n", "by": "u", "order_by": "t"},
            {"type": "target_encode", "name": "rate", "by": "u", "target": "y", "folds": 3, "smoothing": 2, "seed": 5},
            {"type": "target_encode", "name": "other", "by": "u", "target": "y", "folds": 2, "fold_by": "n"},
            {"type": "group_statistics", "name": "g", "by": "u", "of": "n", "statistics": ["std", "mean", "count"]},
        ],
        labels=[{"name": "y"}],
        dense=[
            *({"name": name} for name in ("rate", "other", "g_n_std", "g_n_mean", "g_n_count")),
            {"name": "lag", "operators": [{"type": "fill", "value": -999}]},
        ],
        categorical=[
            {"name": "seen", "kind": "sequence", "max_length": 4, "encoding": {"type": "raw", "missing": -1}},
            {"name": "clicked", "kind": "sequence", "max_length": 4, "encoding": {"type": "raw", "missing": -1}},
        ],
        ignored=["n"],
    )  # fmt: skip


def expected(rows: dict[str, list[int]], training: list[bool]) -> dict[str, list[Any]]:
    """Every derived column, from its definition."""
    y, u, t, n = (rows[name] for name in ("y", "u", "t", "n"))
    every = range(len(n))
    found: dict[str, list[Any]] = {
        "seen": histories([(u[i], t[i], n[i], True) for i in every], 4),
        "clicked": histories([(u[i], t[i], n[i], y[i] == 1) for i in every], 3),
    }
    found["lag"] = []
    for i in every:
        before = sorted((t[j], j) for j in every if u[j] == u[i] and (t[j], j) < (t[i], i))
        found["lag"].append(n[i] - n[before[-1][1]] if before else -999)
    folds = fold_of(np.arange(len(n), dtype=np.uint64), 3, 5).tolist()
    found["rate"] = []
    for i in every:
        others = [j for j in every if training[j] and (not training[i] or folds[j] != folds[i])]
        prior = sum(y[j] for j in others) / len(others) if others else 0.0
        same = [y[j] for j in others if u[j] == u[i]]
        found["rate"].append(float(np.float32((sum(same) + 2 * prior) / (len(same) + 2))))
    for i in every:
        group = np.array([n[j] for j in every if training[j] and u[j] == u[i]], float)
        numbers = (group.std(), group.mean(), len(group)) if len(group) else (None, None, 0)
        for name, number in zip(("g_n_std", "g_n_mean", "g_n_count"), numbers, strict=True):
            found.setdefault(name, []).append(number)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_derived_columns_are_their_definition_over_shards_files_and_parts(
    tmp_path: Path, monkeypatch: Any, seed: int
) -> None:
    rows = log(seed, 240)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 60)
    monkeypatch.setattr(derive, "_ROWS_AT_ONCE", 7)
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.csv")
        lines = ["y,u,t,n"] + [",".join(str(rows[c][i]) for c in "yutn") for i in range(80 * number, 80 * number + 80)]
        files[-1].write_text("\n".join(lines))
    monkeypatch.setattr("viviane.etl.pipeline._Run", _small_shards())
    split = ("rows:train=0.6,test=0.4", "time:t:train=0.5,test=0.5", "hash:n:train=0.7,test=0.3")[seed % 3]
    run(whole(), files, tmp_path / "out", split=split, threads=2)
    assert len(list((tmp_path / "out").glob("*/part-*.parquet"))) == 2
    parts = {name: read(tmp_path / "out" / name) for name in ("train", "test")}
    numbers = set(parts["train"]["n"])
    truth = expected(rows, [n in numbers for n in rows["n"]])
    for found in parts.values():
        for name, column in truth.items():
            for n, value in zip(found["n"], found[name], strict=True):
                assert value == (column[n] if isinstance(column[n], list) else pytest.approx(column[n], rel=1e-6)), name


def _small_shards() -> Any:
    from viviane.etl.pipeline import _Run

    class Small(_Run):
        """A run whose shards hold a few rows."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.shard_bytes = 300

    return Small


@pytest.mark.parametrize(("flip", "by"), [(7, None), (20, "n"), (41, "u")])
def test_a_label_has_no_part_in_its_own_row(tmp_path_factory: Any, flip: int, by: str | None) -> None:
    """Turning one training row's label round changes nothing that the row itself is given."""
    folder = tmp_path_factory.mktemp("flip")
    rows = log(1, 60)
    derived: dict[str, Any] = {"type": "target_encode", "name": "rate", "by": "u", "target": "y", "folds": 3}
    made = config(
        [{"name": name, "type": "int"} for name in ("y", "u", "t", "n")],
        derived=[
            derived | ({"fold_by": by} if by else {}),
            {"type": "history", "name": "h", "source": "y", "by": "u", "order_by": "t", "last": 9},
        ],
        labels=[{"name": "y"}],
        dense=[{"name": "rate"}],
        categorical=[{"name": "h", "kind": "sequence", "max_length": 9, "encoding": {"type": "raw", "missing": -1}}],
        ignored=["n"],
    )
    found = []
    for turned in (False, True):
        y = [1 - value if turned and n == flip else value for n, value in enumerate(rows["y"])]
        pq.write_table(pa.table(rows | {"y": y}), folder / "raw.parquet")
        run(made, folder / "raw.parquet", folder / "out", overwrite=True, threads=1)
        found.append(read(folder / "out/train"))
    moment = [n for n in range(60) if (rows["u"][n], rows["t"][n]) == (rows["u"][flip], rows["t"][flip])]
    assert found[0]["rate"][flip] == found[1]["rate"][flip]
    if by == "u":  # no row of the user sees another label of that user
        own = [n for n in range(60) if rows["u"][n] == rows["u"][flip]]
        assert [found[0]["rate"][n] for n in own] == [found[1]["rate"][n] for n in own]
    assert [found[0]["h"][n] for n in moment] == [found[1]["h"][n] for n in moment]
    assert found[0]["y"] != found[1]["y"]


def test_folds_depend_on_every_bit_of_the_seed() -> None:
    numbers = np.arange(4096, dtype=np.uint64)
    drawn = [fold_of(numbers, 5, seed) for seed in (0, 1, 2, 2**16, 2**31, 2**32 - 1)]
    for one in drawn:
        assert np.bincount(one, minlength=5).min() > 700
    for one, other in combinations(drawn, 2):  # independent folds agree on a fifth of the rows
        assert 0.15 < np.mean(one == other) < 0.25
    # Written down, so that folds stay those of earlier versions.
    assert fold_of(np.arange(12, dtype=np.uint64), 5, 7).tolist() == [4, 2, 0, 2, 2, 2, 1, 0, 3, 1, 0, 4]


def test_the_standard_deviation_is_that_of_the_population(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": ["a", "a", "b"], "x": [1.0, 3.0, 5.0]}), tmp_path / "raw.parquet")
    made = config(
        [{"name": "k"}, {"name": "x", "type": "float"}],
        derived=[{"type": "group_statistics", "name": "g", "by": "k", "of": "x", "statistics": ["std"]}],
        dense=[{"name": "g_x_std"}],
    )
    fitted = fit(made, tmp_path / "raw.parquet")
    found = fitted.transform_table(pa.table({"k": ["a", "b"], "x": [0.0, 0.0]}))
    assert found["g_x_std"].to_pylist() == [1.0, 0.0]


HISTORY: dict[str, Any] = {"type": "history", "name": "f", "source": "n", "by": "u", "order_by": "t", "last": 3}


@pytest.mark.parametrize(
    "feature",
    [
        {"dense": [{"name": "f", "source": "y"}]},
        {"dense": [{"name": "y"}]},
        {"categorical": [{"name": "f", "source": "y"}]},
        {"categorical": [{"name": "f", "source": ["u", "y"], "encoding": {"type": "hash", "num_ids": 9}}]},
        {"derived": [HISTORY | {"by": "y"}]},
        {"derived": [HISTORY | {"by": ["u", "y"]}]},
        {"derived": [HISTORY | {"order_by": "y"}]},
        {"derived": [{"type": "count", "name": "f", "by": ["u", "y"]}]},
        {"derived": [{"type": "group_statistics", "name": "f", "by": "u", "of": "y"}]},
        {"derived": [{"type": "lag", "name": "f", "source": "y", "by": "u", "order_by": "t"}]},
        {"derived": [{"type": "target_encode", "name": "f", "by": "y", "target": "label"}]},
        {"derived": [{"type": "target_encode", "name": "f", "by": "u", "target": "label", "fold_by": "y"}]},
    ],
)
def test_a_feature_of_the_label_of_its_own_row_is_refused(feature: dict[str, Any]) -> None:
    """Columns with the label as their source, and histories by the label, were taken."""
    columns: list[dict[str, Any]] = [{"name": name, "type": "int"} for name in ("y", "u", "t", "n")]
    rest = {"labels": [{"name": "label", "source": "y"}], "categorical": [{"name": "u"}]}
    for allowed in (rest, {**rest, "derived": [HISTORY | {"source": "y"}]}):
        config(columns, **allowed)  # earlier rows may show their labels
    with pytest.raises(ConfigError, match=r"would hold the label of column 'y'|would show it"):
        config(columns, **{**rest, **feature, "categorical": rest["categorical"] + feature.get("categorical", [])})
