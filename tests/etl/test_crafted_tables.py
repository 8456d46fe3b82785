"""Tables inside an etl.zip that hold other types than the config has, or miss values: refused when it is loaded."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from viviane.core.errors import DataError
from viviane.etl import EtlConfig, FittedEtl, run

ROWS = "click,user,movie\n1,u1,1\n0,u2,2\n1,u1,3\n0,u3,1\n1,u1,1\n"
TABLE = "id,year,title,tags\n1,1990,x,a|b\n2,1991,y,c\n3,1992,z,\n"
TABLE_COLUMNS = [
    {"name": "id", "type": "int"},
    {"name": "year", "type": "int"},
    {"name": "title"},
    {"name": "tags", "separator": "|"},
]
FILL = [{"type": "fill", "value": 0}]
TYPES = {
    pa.int64(): 7, pa.int32(): 7, pa.float64(): 1.5, pa.string(): "x", pa.large_string(): "x", pa.binary(): b"x",
    pa.bool_(): True, pa.timestamp("us"): 7, pa.decimal128(5, 2): 1, pa.list_(pa.int64()): [1], pa.null(): None,
    pa.struct([("a", pa.int64())]): {"a": 1},
}  # fmt: skip


def config(folder: Path) -> EtlConfig:
    (folder / "movies.csv").write_text(TABLE)
    columns = [{"name": "click", "type": "int"}, {"name": "user"}, {"name": "movie", "type": "int"}]
    join = {"type": "join", "name": "m", "by": "movie", "on": "id", "file": str(folder / "movies.csv"),
            "input": {"columns": TABLE_COLUMNS}}  # fmt: skip
    return EtlConfig.from_dict(
        {
            "input": {"columns": columns},
            "labels": [{"name": "click"}],
            "derived": [
                join,
                {
                    "type": "group_statistics",
                    "name": "g",
                    "by": "user",
                    "of": "movie",
                    "statistics": ["mean", "median"],
                },
                {"type": "target_encode", "name": "t", "by": ["user", "movie"], "target": "click"},
            ],
            "dense": [{"name": name, "operators": FILL} for name in ("m_year", "g_movie_mean", "t")],
            "categorical": [
                *({"name": name} for name in ("user", "movie", "m_title")),
                {"name": "m_tags", "kind": "multi_hot", "max_length": 3},
                {"name": "years", "source": "m_year", "operators": FILL},
                {"name": "cross", "source": ["user", "movie"]},
            ],
        },
        where="the test",
    )


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("crafted")
    (folder / "raw.csv").write_text(ROWS)
    run(config(folder), folder / "raw.csv", folder / "out")
    with zipfile.ZipFile(folder / "out/etl.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def load(path: Path, members: dict[str, bytes], name: str, table: pa.Table) -> FittedEtl:
    """Load the ETL with another table, and the check sums to it."""
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=False)
    new = {**members, name: sink.getvalue()}
    manifest = json.loads(new.pop("manifest.json"))
    manifest["members"] = {
        one: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for one, data in new.items()
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for one, data in {"manifest.json": json.dumps(manifest).encode(), **new}.items():
            archive.writestr(zipfile.ZipInfo(one), data)
    return FittedEtl.load(path)


def tables(members: dict[str, bytes]) -> dict[str, pa.Table]:
    return {name: pq.read_table(io.BytesIO(data)) for name, data in members.items() if name.endswith(".parquet")}


def refused(load: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as found:
        load()
    return str(found.value)


def test_the_tables_as_they_are_load(tmp_path: Path, members: dict[str, bytes]) -> None:
    assert len(tables(members)) == 9
    for name, table in tables(members).items():
        load(tmp_path / "same.zip", members, name, table)


def test_columns_of_other_types_are_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    accepted = []
    for name, table in tables(members).items():
        for place, column in enumerate(table.column_names):
            for kind, value in TYPES.items():
                if kind == table.schema.field(column).type:
                    continue
                other = table.set_column(place, column, pa.array([value] * table.num_rows, kind))
                try:
                    load(tmp_path / "x.zip", members, name, other)
                    accepted.append((name, column, str(kind)))
                except DataError:
                    pass
    # What operators compute may be a whole number or not: both are looked up.
    assert accepted == [("vocabularies/00004.parquet", "value", "int64")]


def test_missing_keys_and_values_are_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    for name, table in tables(members).items():
        for place, column in enumerate(table.column_names):
            if column.startswith("m_"):  # a property of a film may be missing
                continue
            values = table.column(column).combine_chunks()
            first = pa.concat_arrays([pa.nulls(1, values.type), values.slice(1)])
            refused(lambda: load(tmp_path / "x.zip", members, name, table.set_column(place, column, first)))  # noqa: B023


def test_the_message_names_place_and_types(tmp_path: Path, members: dict[str, bytes]) -> None:
    name = "external/00000.parquet"
    table = tables(members)[name]
    keys = table.set_column(0, "__key0", table.column(0).cast(pa.string()))
    message = refused(lambda: load(tmp_path / "x.zip", members, name, keys))
    assert "holds a column of another type" in message
    assert "join 'm', column 'id'" in message
    assert "string" in message
    assert "int64" in message
