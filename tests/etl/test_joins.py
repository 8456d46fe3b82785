"""Columns of another table by key, against pandas' merge; kept with the fitted ETL; the same on every engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import config, data_bytes, read, text

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, FittedEtl, run
from viviane.etl.external import JoinTable, KeyPlaces

MOVIES = [{"name": "id"}, {"name": "year", "type": "int"}, {"name": "genres", "separator": "|"}, {"name": "studio"}]


def joined(file: Path | list[str], **change: Any) -> EtlConfig:
    """A join used as a number, a bag, a category, and as the key of a count and source of a map."""
    join = {"type": "join", "name": "m", "by": "movie", "on": "id", "file": file, "input": {"columns": MOVIES}}
    return config(
        [{"name": "movie"}, {"name": "x", "type": "float"}],
        derived=[
            {"type": "count", "name": "of_studio", "by": "m_studio"},
            {**join, "file": str(file) if isinstance(file, Path) else file, **change},
            {"type": "map", "name": "kind", "source": "m_studio", "values": {"S": "one"}},
        ],
        dense=[{"name": "m_year", "operators": [{"type": "fill", "value": "mean"}]}, {"name": "of_studio"}],
        categorical=[{"name": "m_genres", "kind": "multi_hot"}, {"name": "kind"}, {"name": "movie"}],
    )


TABLE = "id,year,genres,studio\nheat,1995,Crime|Drama,S\nbig,1988,,T\n,1900,X,X\nfoo,,Drama,S\n"
ROWS = "movie,x\nheat,1\nbig,2\nnew,3\n,4\nfoo,5\nheat,6\n"


def test_columns_of_another_table(tmp_path: Path) -> None:
    raw, movies = text(tmp_path / "raw.csv", ROWS), text(tmp_path / "movies.csv", TABLE)
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(joined(movies), raw, tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    found = read(tmp_path / "duckdb/train")
    mean = np.float32((1995 + 1988 + 1995) / 3)
    assert found["m_year"] == [1995.0, 1988.0, mean, mean, mean, 1995.0]
    assert found["of_studio"] == [3.0, 1.0, 0.0, 0.0, 3.0, 3.0]
    fitted = FittedEtl.load(tmp_path / "duckdb/etl.zip")
    drama, crime = (fitted.vocabularies["m_genres"].values.to_pylist().index(one) + 3 for one in ("Drama", "Crime"))
    assert found["m_genres"] == [[crime, drama], [1], [1], [1], [drama], [crime, drama]]
    assert found["kind"] == [3, 4, 1, 1, 3, 3]
    movies.unlink()  # the fitted ETL holds the table
    rows = pa.table({"movie": ["foo", "heat", "zzz", None], "x": [0.0] * 4})
    assert fitted.transform_table(rows)["m_year"].to_pylist() == [mean, 1995.0, mean, mean]
    fitted.transform(raw, tmp_path / "again")
    assert read(tmp_path / "again") == found
    assert fitted.save(tmp_path / "copy.zip").read_bytes() == (tmp_path / "duckdb/etl.zip").read_bytes()


def test_a_changed_table_is_another_job_and_several_files_are_one_table(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", ROWS)
    head = TABLE.splitlines(keepends=True)
    text(tmp_path / "a.csv", head[0] + head[1]), text(tmp_path / "b.csv", head[0] + "".join(head[2:]))
    text(tmp_path / "movies.csv", TABLE)
    run(joined(tmp_path / "movies.csv"), raw, tmp_path / "one")
    run(joined([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]), raw, tmp_path / "two")
    assert read(tmp_path / "one/train") == read(tmp_path / "two/train")
    text(tmp_path / "movies.csv", TABLE.replace("1995", "2001"))
    with pytest.raises(ValueError, match="exists"):
        run(joined(tmp_path / "movies.csv"), raw, tmp_path / "one")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE + "heat,1,,\n", r"(?s)a key occurs twice in a table to join.*movies.csv, line 6.*heat"),
        (TABLE + "other,abc,,\n", r"(?s)not a whole number.*movies.csv, line 6, column 'year'"),
        (TABLE + "other,1\n", r"(?s)2 columns instead of 4.*line 6"),
        ("id,year\nheat,1\n", "a column is missing in the header"),
        ("", "empty"),
        (None, "no such input file"),
    ],
)
def test_bad_tables_are_refused_with_their_line(tmp_path: Path, table: str | None, message: str) -> None:
    raw = text(tmp_path / "raw.csv", ROWS)
    if table is not None:
        text(tmp_path / "movies.csv", table)
    with pytest.raises(DataError, match=message):
        run(joined(tmp_path / "movies.csv"), raw, tmp_path / "out")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    raw, movies = text(tmp_path / "raw.csv", ROWS), text(tmp_path / "movies.csv", TABLE)
    run(joined(movies), raw, tmp_path / "out")
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    FittedEtl(fitted.config, fitted.states, fitted.borders, fitted.vocabularies, fitted.groups).save(tmp_path / "x.zip")
    with pytest.raises(DataError, match="lacks the table of a join"):
        FittedEtl.load(tmp_path / "x.zip")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on": ["id", "year"]}, "by names 1 columns, on 2"),
        ({"on": "nope"}, "'nope' is not among the columns"),
        ({"on": "year"}, "column 'movie' is string, its partner 'year' int"),
        ({"on": "genres"}, "its partner 'genres' a list"),
        ({"by": "x", "on": "id"}, "key column 'x' is of type float"),
        ({"input": {"columns": [{"name": "id"}]}}, "takes no column"),
        ({"input": {"columns": [{"name": "id"}, {"name": "t", "type": "timestamp"}]}}, "'t' to join is a timestamp"),
        ({"input": {"columns": MOVIES, "hive_partitioning": True}}, "no columns in its path"),
    ],
)
def test_joins_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(tmp_path / "movies.csv", **change)


KEYS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "é", None]), st.sampled_from([0, 1, 2**62, -1, None]), st.sampled_from("xy")),
    max_size=20,
)


def arrays(rows: list[tuple[Any, ...]]) -> list[Any]:
    kinds = (pa.string(), pa.int64(), pa.string())
    return [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]


@given(known=KEYS, asked=KEYS)
def test_places_are_those_of_a_dict(known: list[Any], asked: list[Any]) -> None:
    known = list(dict.fromkeys(row for row in known if None not in row))
    places = {row: place for place, row in enumerate(known)}
    found = KeyPlaces(arrays(known)).find(arrays(asked))
    assert found.tolist() == [places.get(row, -1) for row in asked]
    assert len(set(KeyPlaces(arrays(known)).codes.tolist())) == len(known)


def test_against_pandas_merge_on_two_keys_in_parquet(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    pairs = pd.MultiIndex.from_product([list("abcd"), range(5)], names=["u", "v"]).to_frame(index=False)
    table = pairs.sample(14, random_state=1).assign(price=lambda f: np.arange(len(f)) / 7)
    rows = pd.DataFrame({"u": draw.choice(list("abcde"), 300), "v": draw.integers(0, 6, 300)})
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), tmp_path / "table.parquet")
    pq.write_table(pa.Table.from_pandas(rows, preserve_index=False), tmp_path / "raw.parquet")
    columns = [{"name": "u"}, {"name": "v", "type": "int"}]
    join = {
        "type": "join", "name": "t", "by": ["u", "v"], "file": str(tmp_path / "table.parquet"),
        "input": {"columns": [*columns, {"name": "price", "type": "float"}]},
    }  # fmt: skip
    made = config(columns, derived=[join], dense=[{"name": "t_price", "operators": [{"type": "fill", "value": -1}]}])
    run(made, tmp_path / "raw.parquet", tmp_path / "out")
    wanted = rows.merge(table, how="left", on=["u", "v"])["price"].fillna(-1).astype(np.float32)
    assert read(tmp_path / "out/train")["t_price"] == wanted.tolist()


def test_keys_of_a_table_are_indexed_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(KeyPlaces):
        def __init__(self, known: list[Any]) -> None:
            made.append(len(known))
            super().__init__(known)

    monkeypatch.setattr("viviane.etl.external.KeyPlaces", Counted)
    table = JoinTable(pa.table({"k": [1, 2], "v": [10, 20]}), 1)
    for _ in range(3):
        assert table.places.find([pa.array([2, 3])]).tolist() == [1, -1]
    assert made == [1]
