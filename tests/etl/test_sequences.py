"""Rows of one key to lists: against a plain loop, in pieces of any size, and on to a data set."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raw_files import config, read, text

import viviane.etl.sequence_job as module
from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset
from viviane.etl import SequenceConfig, run, sequences
from viviane.etl.group_lists import Numbers

COLUMNS: list[dict[str, Any]] = [
    {"name": "u"},
    {"name": "v", "type": "int"},
    {"name": "t", "type": "float"},
    {"name": "i"},
    {"name": "x", "type": "float"},
    {"name": "n", "type": "int"},
]
CLICK = {"column": "n", "keep": ">", "value": 0}
MADE: list[dict[str, Any]] = [
    {"name": "last", "source": "i", "last": 3},
    {"name": "but_last", "source": "i", "last": 2, "skip": 1},
    {"name": "first", "source": "x", "first": 2},
    {"name": "but_first", "source": "n", "first": 2, "skip": 2},
    {"name": "clicked", "source": "i", "last": 2, "where": CLICK},
    {"name": "passed", "source": "i", "last": 2, "where": {**CLICK, "keep": "<="}},
    {"name": "start", "source": "t", "take": "first"},
    {"name": "item", "source": "i", "take": "last"},
    {"name": "num", "source": "x", "take": "count", "where": CLICK},
    *({"name": f"x_{take}", "source": "x", "take": take} for take in ("sum", "mean", "min", "max")),
    *({"name": f"n_{take}", "source": "n", "take": take} for take in ("sum", "mean", "min", "max")),
]


def settings_of(columns: Any = MADE, by: Any = "u", **rest: Any) -> SequenceConfig:
    return SequenceConfig.from_dict(
        {"input": {"columns": COLUMNS}, "by": by, "order_by": "t", "columns": columns, **rest}
    )


def cells_of(one: dict[str, Any], group: list[dict[str, Any]]) -> Any:
    """One column of one group, by the words of the settings."""
    clicks = [row for row in group if row["n"] is not None]
    rows = group
    if "where" in one:
        rows = [row for row in clicks if (row["n"] > 0) == (one["where"]["keep"] == ">")]
    values = [row[one["source"]] for row in rows if row[one["source"]] is not None]
    skip, take = one.get("skip", 0), one.get("take")
    if "first" in one:
        return values[skip:][: one["first"]]
    if "last" in one:
        return values[: len(values) - skip][-one["last"] :] if len(values) > skip else []
    if take in ("first", "last"):
        return (values[0] if take == "first" else values[-1]) if values else None
    if take in ("count", "sum"):
        return len(values) if take == "count" else sum(values)
    if not values:
        return None
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}[take]


def by_hand(table: pa.Table, config: SequenceConfig) -> list[dict[str, Any]]:
    rows = [row for row in table.to_pylist() if None not in (row["t"], *(row[key] for key in config.keys))]
    rows.sort(key=lambda row: ([_order(row[key]) for key in config.keys], row["t"]))  # stable: ties stay as they came
    groups: list[tuple[Any, int, list[dict[str, Any]]]] = []
    for row in rows:
        key = [row[name] for name in config.keys]
        if groups and groups[-1][0] == key:
            session, group = groups[-1][1], groups[-1][2]
            if config.gap is None or row["t"] - group[-1]["t"] <= config.gap:
                group.append(row)
                continue
            groups.append((key, session + 1, [row]))
        else:
            groups.append((key, 0, [row]))
    found = []
    for key, session, group in groups:
        if len(group) >= config.min_rows:
            made = dict(zip(config.keys, key, strict=True))
            made |= {"session": session} if config.gap is not None else {}
            found.append(made | {one["name"]: cells_of(one, group) for one in MADE})
    return found


def _order(key: Any) -> Any:
    return key.encode() if isinstance(key, str) else key


_ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.sampled_from(["a", "b", "é", "中", "1:a"])),
        st.one_of(st.none(), st.integers(0, 1)),
        st.one_of(st.none(), st.integers(0, 12)),
        st.one_of(st.none(), st.sampled_from(["pen", "ink", "ü", "紙"])),
        st.one_of(st.none(), st.integers(-100, 100)),
        st.one_of(st.none(), st.integers(-(2**60), 2**60)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=15, deadline=None)
@example(rows=[("a", None, 0, None, None, 2**53 + 1)], cross=False, gap=None, least=1, at_once=1)
@given(
    rows=_ROWS, cross=st.booleans(), gap=st.sampled_from([None, 1, 2.5]), least=st.sampled_from([1, 2]),
    at_once=st.sampled_from([1, 3, 100]),
)  # fmt: skip
def test_against_a_loop(rows: list[tuple[Any, ...]], cross: bool, gap: float | None, least: int, at_once: int) -> None:
    kinds = (pa.string(), pa.int64(), pa.float64(), pa.string(), pa.float64(), pa.int64())
    columns = zip(*rows, strict=True)
    table = pa.table({c["name"]: pa.array(one, k) for c, one, k in zip(COLUMNS, columns, kinds, strict=True)})
    made = settings_of(by=["u", "v"] if cross else "u", gap=gap, min_rows=least)
    wanted = by_hand(table, made)
    usual = module._ROWS_AT_ONCE
    module._ROWS_AT_ONCE = at_once
    try:
        with tempfile.TemporaryDirectory() as name:
            pq.write_table(table, Path(name) / "raw.parquet")
            if not by_hand(table, made.model_copy(update={"min_rows": 1})):
                with pytest.raises(DataError, match="no row belongs to a group"):
                    sequences(made, Path(name) / "raw.parquet", Path(name) / "out")
                return
            summary = sequences(made, Path(name) / "raw.parquet", Path(name) / "out")
            found = pq.read_table(Path(name) / "out/part-00000.parquet").to_pylist()
    finally:
        module._ROWS_AT_ONCE = usual
    # Sums in the order of the rows: equal bit by bit. Means of whole numbers near 2^60 round in float64.
    for mine, other in zip(found, wanted, strict=True):
        mean, other_mean = mine.pop("n_mean"), other.pop("n_mean")
        assert (mean is None) == (other_mean is None)
        assert mean is None or mean == pytest.approx(other_mean, rel=1e-12, abs=2**11)
        assert mine == other
    assert summary.groups == len(wanted)
    assert summary.no_key == sum(row[2] is None or row[0] is None or (cross and row[1] is None) for row in rows)


def test_sizes_against_pandas(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"u": rng.zipf(1.5, 20_000) % 500, "t": rng.integers(0, 10**6, 20_000)})
    frame["u"] = "u" + frame["u"].astype(str)
    frame["i"] = rng.integers(0, 99, 20_000).astype(str)
    frame.to_csv(tmp_path / "raw.csv", index=False)
    made = SequenceConfig.from_dict({
        "input": {"columns": [{"name": "u"}, {"name": "t", "type": "int"}, {"name": "i"}]}, "by": "u", "order_by": "t",
        "columns": [{"name": "i", "last": 50}],
    })  # fmt: skip
    sequences(made, tmp_path / "raw.csv", tmp_path / "one", threads=1)
    sequences(made, tmp_path / "raw.csv", tmp_path / "two", threads=3, memory_limit="1GB")
    found = (tmp_path / "one/part-00000.parquet").read_bytes()
    assert found == (tmp_path / "two/part-00000.parquet").read_bytes()
    grouped = frame.sort_values("t", kind="stable").groupby("u")["i"].agg(lambda one: list(one)[-50:])
    table = pq.read_table(tmp_path / "one/part-00000.parquet").to_pandas()
    assert {u: list(i) for u, i in zip(table["u"], table["i"], strict=True)} == grouped.to_dict()


def test_sessions_by_time_go_on_to_a_data_set(tmp_path: Path) -> None:
    raw = text(
        tmp_path / "raw.csv",
        "u,i,t\nann,pen,2024-01-01 10:00:00\nann,ink,2024-01-01 10:29:00\nann,cup,2024-01-01 11:00:00\n"
        "bob,pen,2024-01-01 10:00:00\nbob,ink,bad\n",
    )
    columns = [{"name": "u"}, {"name": "i"}, {"name": "t", "type": "timestamp"}]
    made = SequenceConfig.from_dict({
        "input": {"columns": columns}, "by": "u", "order_by": "t", "gap": 1800,
        "columns": [{"name": "items", "source": "i", "last": 9}, {"name": "t", "take": "last"}],
    })  # fmt: skip
    summary = sequences(made, raw, tmp_path / "sessions", on_bad_row="reject")
    assert (summary.rows_in, summary.rejected, summary.groups) == (5, 1, 3)
    assert sequences(made, raw, tmp_path / "sessions", on_bad_row="reject") == summary  # nothing to do
    with pytest.raises(ConfigError, match="the output exists"):
        sequences(settings_of(), raw, tmp_path / "sessions")
    then = config(
        [{"name": "u"}, {"name": "items", "list": True}, {"name": "t", "type": "timestamp"}],
        categorical=[{"name": "u"}, {"name": "items", "kind": "sequence", "max_length": 9}],
        ignored=["t"],
    )
    run(then, tmp_path / "sessions", tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found["items"] == [[3, 5], [4], [3]]  # pen twice; cup and ink once
    Dataset(tmp_path / "out/train").check()


def test_a_killed_run_resumes_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = text(tmp_path / "raw.csv", "u,v,t,i,x,n\na,1,1,p,1,1\nb,1,2,q,2,0\na,1,0,r,3,1\n")
    sequences(settings_of(), raw, tmp_path / "whole")

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module._Maker, "_groups", stop)
        with pytest.raises(KeyboardInterrupt):
            sequences(settings_of(), raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.etl/sorted.parquet").exists()
    sequences(settings_of(), raw, tmp_path / "out")
    name = "part-00000.parquet"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "w"}, "no input column 'w'; choose"),
        ({"by": "x"}, "of the key 'x' is of type float: give single string, int, hex"),
        ({"order_by": "u"}, "to order by 'u' is of type string"),
        ({"columns": [{"name": "u", "last": 3}]}, "column named twice: u"),
        ({"columns": [{"name": "a", "source": "i"}]}, "exactly one of first, last and take"),
        ({"columns": [{"name": "a", "source": "i", "first": 1, "last": 1}]}, "exactly one of first, last and take"),
        ({"columns": [{"name": "a", "source": "i", "take": "sum"}]}, "to take the sum of 'i' is of type string"),
        ({"columns": [{"name": "a", "source": "i", "take": "last", "skip": 1}]}, "skip is for lists"),
        ({"gap": 1, "columns": [{"name": "session", "source": "i", "last": 1}]}, "column named twice: session"),
        ({"gap": 0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(**{"by": "u", **change}) if "order_by" not in change else SequenceConfig.from_dict(
            {**settings_of().to_dict(), **change}
        )


def test_sums_of_whole_numbers_are_exact_or_refused(tmp_path: Path) -> None:
    half, most = 2**62, 2**63 - 1
    cases = {
        "exact": ([half, half - 1, -5, 5], most),
        "back again": ([half, half, half, -half, -half], half),
        "lowest": ([-half, -half], -(2**63)),
        "beyond": ([half, half], None),
        "far beyond": ([most] * 4, None),  # wraps to a small number
        "below": ([-half, -half, -1], None),
    }
    for name, (values, expected) in cases.items():
        for pieces in (1, 2, 5):
            column = Numbers("sum", pa.int64(), "total")
            refused = pytest.raises(DataError, match=r"beyond 64 bits[\s\S]*'total'")
            with refused if expected is None else nullcontext():
                for part in np.array_split(np.array(values), pieces):
                    column.add(pa.array(part), np.zeros(len(part), np.int64), 1)
                found = column.add(pa.array([], pa.int64()), np.zeros(0, np.int64), 2)
                assert found.to_pylist() == [expected], (name, pieces)
    raw = tmp_path / "raw.csv"
    raw.write_text(f"u,n\na,1\nb,{most}\nb,{most}\n")
    config = SequenceConfig(
        input={"columns": [{"name": "u"}, {"name": "n", "type": "int"}]}, by="u", order_by="n",
        columns=[{"name": "total", "source": "n", "take": "sum"}],
    )  # fmt: skip
    with pytest.raises(DataError, match="beyond 64 bits"):
        sequences(config, raw, tmp_path / "out")
    for threads in (0, 10**30, "4"):
        with pytest.raises(ConfigError, match="threads"):
            sequences(config, raw, tmp_path / "out", threads=threads)
