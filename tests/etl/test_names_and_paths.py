"""Names that differ only by case stay apart, and folders with special names change nothing."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raw_files import clicks, config, read, text

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, FittedEtl, SequenceConfig, run, sequences
from viviane.etl.engine import DuckDbEngine
from viviane.etl.sql_names import sql_name

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
ENGINES: list[Any] = [
    {"engine": "duckdb"},
    pytest.param({"engine": "gpu", "device": "cpu"}, marks=pytest.mark.slow),
    pytest.param(
        {"engine": "spark", "master": "local[1]"},
        marks=[pytest.mark.slow, pytest.mark.skipif(not find_spec("pyspark"), reason="needs the extra spark")],
    ),
]
FILL: dict[str, Any] = {"type": "fill", "value": 0}


def twins() -> EtlConfig:
    """Every kind of column twice, under names that differ only by case."""
    return config(
        [
            *({"name": name, "type": "int"} for name in ("Y", "y", "T")),
            *({"name": name} for name in ("User", "user", "USER")),
            *({"name": name, "type": "float"} for name in ("X", "x")),
        ],
        derived=[
            {"type": "count", "name": "N", "by": "User"},
            {"type": "count", "name": "n", "by": "user"},
            {"type": "group_statistics", "name": "G", "by": ["User", "user"], "of": ["X", "x"]},
            {"type": "target_encode", "name": "R", "by": "user", "target": "Y", "fold_by": "USER"},
            {"type": "target_encode", "name": "r", "by": "User", "target": "y"},
            {"type": "difference_lag", "name": "L", "source": "X", "by": "User", "order_by": "T"},
            {"type": "difference_lag", "name": "l", "source": "x", "by": "user", "order_by": "T"},
            {"type": "history", "name": "H", "source": "User", "by": "user", "order_by": "T", "last": 3},
        ],
        labels=[{"name": "Y"}, {"name": "y"}],
        dense=[
            {"name": "X", "operators": [{"type": "standardize"}]},
            {"name": "x", "operators": [{"type": "min_max"}]},
            *({"name": name} for name in ("N", "n", "R", "r")),
            *({"name": name, "operators": [FILL]} for name in ("L", "l", "G_X_mean", "G_x_mean")),
        ],
        categorical=[
            {"name": "User"},
            {"name": "user"},
            {"name": "USER", "encoding": {"type": "hash", "num_ids": 100}},
            {"name": "Cross", "source": ["User", "user"]},
            {"name": "cross", "source": ["user", "USER"], "encoding": {"type": "hash", "num_ids": 1000}},
            {"name": "H", "kind": "sequence", "max_length": 3, "vocabulary": "User"},
        ],
        filters=[{"column": "X", "keep": ">=", "value": 0}, {"column": "x", "keep": "<", "value": 900}],
    )


def rows() -> dict[str, list[Any]]:
    return {
        "Y": [i % 2 for i in range(60)],
        "y": [int(i % 3 == 0) for i in range(60)],
        "T": [i // 2 for i in range(60)],
        "User": [f"u{i % 5}" for i in range(60)],
        "user": [f"v{i % 7}" for i in range(60)],
        "USER": [f"w{i % 11}" for i in range(60)],
        "X": [float(i % 13) - (1 if i % 29 == 0 else 0) for i in range(60)],
        "x": [1000.0 if i == 31 else 0.5 * (i % 17) for i in range(60)],
    }


def renamed(value: Any, names: dict[str, str]) -> Any:
    """The same config with other names."""
    if isinstance(value, str):
        for old, new in names.items():
            value = new if value == old else value
            value = f"G_{new}_mean" if value == f"G_{old}_mean" else value
        return value
    if isinstance(value, dict):
        return {key: one if key in ("type", "kind", "format") else renamed(one, names) for key, one in value.items()}
    return [renamed(one, names) for one in value] if isinstance(value, list | tuple) else value


APART = {"y": "other_y", "user": "other_user", "USER": "third_user", "x": "other_x", "n": "other_n", "r": "other_r"}
APART |= {"l": "other_l", "cross": "other_cross", "User": "one_user", "X": "one_x", "Y": "one_y"}


@pytest.mark.parametrize("engine", ENGINES)
def test_names_that_differ_only_by_case_give_what_other_names_give(tmp_path: Path, engine: dict[str, Any]) -> None:
    """The second column of such names got the values of the first one."""
    pq.write_table(pa.table(rows()), tmp_path / "twins.parquet")
    pq.write_table(
        pa.table({renamed(name, APART): values for name, values in rows().items()}), tmp_path / "far.parquet"
    )
    far = EtlConfig.from_dict(renamed(twins().to_dict(), APART))
    split = "hash:{}:train=0.7,test=0.3"
    one = run(twins(), tmp_path / "twins.parquet", tmp_path / "one", split=split.format("user"), **engine)
    two = run(far, tmp_path / "far.parquet", tmp_path / "two", split=split.format("other_user"))
    assert (one.rows, one.filtered) == (two.rows, two.filtered)
    assert one.filtered > 0
    for part in ("train", "test"):
        found = read(tmp_path / "one" / part)
        assert len(found) == len(twins().to_dict()["labels"]) + 10 + 6
        assert {renamed(name, APART): values for name, values in found.items()} == read(tmp_path / "two" / part)
    tables = [
        FittedEtl.load(tmp_path / folder / "etl.zip").transform_table(pq.read_table(tmp_path / f"{file}.parquet"))
        for folder, file in (("one", "twins"), ("two", "far"))
    ]
    assert [column.to_pylist() for column in tables[0].columns] == [column.to_pylist() for column in tables[1].columns]


@pytest.mark.parametrize("engine", ENGINES)
def test_joined_columns_and_neighbours_that_differ_only_by_case(tmp_path: Path, engine: dict[str, Any]) -> None:
    side = {"K": [1, 2], "k": [20, 10], "V": [0.1, 0.2], "v": [0.3, 0.4]}
    pq.write_table(pa.table(side), tmp_path / "side.parquet")
    types = {"K": "int", "k": "int", "V": "float", "v": "float"}

    def join(name: str, key: str, values: str) -> dict[str, Any]:
        there = {"columns": [{"name": one, "type": types[one]} for one in (key, *values)]}
        return {"type": "join", "name": name, "by": key, "file": str(tmp_path / "side.parquet"), "input": there}

    order = {"by": "K", "order_by": "T"}
    made = ("J_V", "J_v", "j_v", "A", "a", "B", "b")
    settings_ = config(
        [*({"name": name, "type": "int"} for name in ("K", "k", "T", "t"))],
        derived=[
            join("J", "K", "Vv"), join("j", "k", "v"),
            *({"type": "lag", "name": name, "source": source, **order} for name, source in ("AT", "at")),
            *({"type": "lead", "name": name, "source": source, **order} for name, source in ("Bt", "bT")),
        ],
        dense=[{"name": name, "operators": [FILL]} for name in made],
    )  # fmt: skip
    raw = {"K": [1, 2, 1, 3], "k": [10, 20, 30, 10], "T": [1, 2, 3, 4], "t": [50, 60, 70, 80]}
    pq.write_table(pa.table(raw), tmp_path / "raw.parquet")
    run(settings_, tmp_path / "raw.parquet", tmp_path / "out", **engine)
    found = read(tmp_path / "out/train")
    truth = ([0.1, 0.2, 0.1, 0], [0.3, 0.4, 0.3, 0], [0.4, 0.3, 0, 0.4], [0, 0, 1, 0], [0, 0, 50, 0], [70, 0, 0, 0],
             [3, 0, 0, 0])  # fmt: skip
    for name, values in zip(made, truth, strict=True):
        assert found[name] == pytest.approx(values), name


def test_sequences_of_names_that_differ_only_by_case(tmp_path: Path) -> None:
    pq.write_table(pa.table(rows()), tmp_path / "twins.parquet")
    grouping = SequenceConfig(
        input={
            "columns": [{"name": "User"}, {"name": "user"}, {"name": "T", "type": "int"}, {"name": "Y", "type": "int"}]
        },
        by=["User"],
        order_by="T",
        columns=[
            {"name": "a", "source": "user", "last": 2, "where": {"column": "Y", "keep": "==", "value": 1}},
            {"name": "A", "source": "User", "last": 1},
        ],
    )
    sequences(grouping, tmp_path / "twins.parquet", tmp_path / "out")
    found = pq.ParquetFile(tmp_path / "out/part-00000.parquet").read().to_pydict()
    assert found["User"] == [f"u{i}" for i in range(5)]
    assert found["A"] == [[f"u{i}"] for i in range(5)]
    last = [[f"v{i % 7}" for i in range(60) if i % 5 == u and i % 2][-2:] for u in range(5)]
    assert found["a"] == last


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=2, unique=True))
@example(["X", "x"])
@example(["x~58", "X"])
@example(['"', "'"])
@example(["a\0", "A\0"])
@example(["ß", "ẞ"])
@example(["K", "\u212a"])
@example(["\ud800", "?"])
def test_any_two_names_stay_apart_in_sql(names: list[str]) -> None:
    one, other = (sql_name(name) for name in names)
    assert one.casefold() != other.casefold()
    assert "\0" not in one
    assert '"' not in one


def test_unusual_names_pass_through_the_engine() -> None:
    engine = DuckDbEngine()
    table = pa.table({"X": [1.0], "x": [2.0], 'say "x"': [3.0], "it's": [4.0], "NUL\0": [5.0], "": [6.0]})
    found = engine.evaluate(table, lambda rows: {name: rows[name] + 1 for name in table.column_names})
    assert found.to_pydict() == {name: [values[0] + 1] for name, values in table.to_pydict().items()}
    engine.close()


FOLDERS = [
    "item=7",
    "click=1",
    "date=2024-01-01",
    "x=__HIVE_DEFAULT_PARTITION__",
    "a*b",
    "[ab]",
    "a?b",
    "it's",
    "a%20b",
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("folder", ["/".join(FOLDERS), *(pytest.param(one, marks=pytest.mark.slow) for one in FOLDERS)])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_folders_with_special_names_change_nothing(
    tmp_path: Path, engine: dict[str, Any], folder: str, kind: str
) -> None:
    """Below item=7 every id became the unknown one: DuckDB took the column from the path."""
    for place in (folder, "plain", "axb", "a", "b"):
        (tmp_path / place).mkdir(exist_ok=True, parents=True)
    for place in (folder, "plain"):
        if kind == "csv":
            text(tmp_path / place / "raw.csv", "click,item,at\n1,pen,1\n0,ink,2\n1,pen,3\n")
        else:
            table = pa.table({"click": [1, 0, 1], "item": ["pen", "ink", "pen"], "at": [1, 2, 3]})
            pq.write_table(table, tmp_path / place / "raw.parquet")
    plain = clicks().to_dict()
    plain["input"]["columns"] += [{"name": "at", "type": "int"}]
    derived = plain | {
        "derived": [
            {"type": "count", "name": "n", "by": "item"},
            {"type": "history", "name": "h", "source": "item", "by": "item", "order_by": "at", "last": 2},
        ],
        "dense": [{"name": "n"}],
    }
    for settings_ in (clicks(), EtlConfig.from_dict(derived)):
        for place in (folder, "plain"):
            run(settings_, tmp_path / place / f"raw.{kind}", tmp_path / place / "out", overwrite=True, **engine)
        assert read(tmp_path / folder / "out/train") == read(tmp_path / "plain/out/train")
        assert read(tmp_path / "plain/out/train")["item"] == [3, 4, 3]
    if engine["engine"] == "spark":
        return
    grouping = SequenceConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]}, by="item", order_by="click",
        columns=[{"name": "c", "source": "click", "last": 3}],
    )  # fmt: skip
    sequences(grouping, tmp_path / folder / f"raw.{kind}", tmp_path / folder / "grouped")
    found = pq.ParquetFile(tmp_path / folder / "grouped/part-00000.parquet").read().to_pydict()
    assert found == {"item": ["ink", "pen"], "c": [[0], [1, 1]]}
    note = json.loads((tmp_path / folder / "grouped/_sequences.json").read_text())
    assert note["groups"] == 2


def partitioned(folder: Path, kind: str) -> EtlConfig:
    """Two days of two cities, which stand in the path only."""
    for day, city, item in (("2024-01-01", "New%20York", "pen"), ("2024-01-02", "__HIVE_DEFAULT_PARTITION__", "ink")):
        place = folder / f"date={day}" / f"city={city}"
        place.mkdir(parents=True)
        if kind == "csv":
            text(place / "part-0.csv", f"click,item\n1,{item}\n0,{item}\n")
        elif kind == "no header":
            text(place / "part-0.csv", f"1,{item}\n0,{item}\n")
        else:
            pq.write_table(pa.table({"click": [1, 0], "item": [item, item]}), place / "part-0.parquet")
    (folder / "_SUCCESS").write_text("")
    return config(
        [{"name": "date", "type": "timestamp"}, {"name": "click", "type": "int"}, {"name": "city"}, {"name": "item"}],
        labels=[{"name": "click"}],
        derived=[{"type": "date_part", "name": "day", "source": "date", "part": "day"}],
        categorical=[{"name": "item"}, {"name": "city"}, {"name": "day", "encoding": {"type": "hash", "num_ids": 100}}],
        ignored=["date"],
        input={"hive_partitioning": True, "header": kind != "no header"},
    )


@pytest.mark.parametrize("kind", ["csv", "no header", "parquet"])
def test_columns_in_the_path_are_read_where_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    settings_ = partitioned(tmp_path / "raw", kind)
    summary = run(settings_, tmp_path / "raw", tmp_path / "out", split="time:date:test@2024-01-02")
    assert summary.rows == {"train": 2, "test": 2}
    found = [read(tmp_path / "out" / part) for part in ("train", "test")]
    assert [one["city"] for one in found] == [[3, 3], [1, 1]]
    assert [str(one["date"][0])[:10] for one in found] == ["2024-01-01", "2024-01-02"]
    assert settings_.to_dict()["input"]["hive_partitioning"] is True
    assert "hive_partitioning" not in clicks().to_dict()["input"]


def test_a_column_in_the_path_that_cannot_be_used(tmp_path: Path) -> None:
    settings_ = partitioned(tmp_path / "raw", "csv")
    odd = tmp_path / "raw/date=yesterday/city=Rome"
    odd.mkdir(parents=True)
    text(odd / "part-0.csv", "click,item\n1,cup\n0,cup\n")
    with pytest.raises(DataError, match=r"not a date and time[\s\S]*date=yesterday.*line 2, column 'date'"):
        run(settings_, tmp_path / "raw", tmp_path / "out")
    summary = run(settings_, tmp_path / "raw", tmp_path / "out", on_bad_row="reject")
    assert (summary.rows_in, summary.rejected, summary.rows) == (6, 2, {"train": 4})
    text(odd / "part-0.csv", "click,item,city\n1,cup,Rome\n")
    with pytest.raises(DataError, match=r"both in the file and in its path\n.*Rome.*\n  value:   'city'"):
        run(settings_, tmp_path / "raw", tmp_path / "out", overwrite=True)
    text(tmp_path / "raw/plain.csv", "click,item\n1,cup\n")
    text(odd / "part-0.csv", "click,item\n")
    with pytest.raises(DataError, match=r"a column is missing in the header[\s\S]*plain.csv"):
        run(settings_, tmp_path / "raw", tmp_path / "out", overwrite=True)
