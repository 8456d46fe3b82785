"""Column types from values; the file that comes of it runs."""

import decimal
import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from viviane import etl
from viviane.cli.main import app
from viviane.core.errors import ConfigError, DataError, MissingExtraError, SchemaError
from viviane.core.rows import plain_table
from viviane.data import Dataset
from viviane.etl import infer, infer_config, infer_file
from viviane.etl.saved import as_written

ROWS = 1000
CHANCE = np.random.default_rng(0)
TABLE = pa.table({
    "click": (np.arange(ROWS) % 10 == 0).astype(int),
    "price": CHANCE.lognormal(0, 2, ROWS),
    "age": CHANCE.integers(18, 28, ROWS),
    "clicks": CHANCE.integers(0, 500, ROWS),
    "user_id": CHANCE.integers(0, 300, ROWS),
    "hash": CHANCE.integers(2**40, 2**41, ROWS) // 2**32 * 2**32 + 7,
    "site": [f"s{n % 7}" for n in range(ROWS)],
    "session": [f"u{n}" for n in range(ROWS)],
    "nothing": pa.nulls(ROWS, pa.string()),
    "same": ["x"] * ROWS,
    "tags": [["a", "b"][: n % 3] for n in range(ROWS)],
    "seen": pa.array(np.arange(ROWS) * 3_600_000_000, pa.timestamp("us")),
})  # fmt: skip


def test_each_column_becomes_what_its_values_are() -> None:
    found = infer_config(TABLE, ["click"])
    assert {one.name: one.kind for one in found.columns} == {
        "click": "label", "price": "number", "age": "number", "clicks": "number", "user_id": "category",
        "hash": "category", "site": "category", "session": "ignored", "nothing": "ignored", "same": "ignored",
        "tags": "list", "seen": "time",
    }  # fmt: skip
    names = [one.name for one in found.config.categorical]
    assert names == [
        "price_bin10", "price_bin40", "age_value", "clicks_bin10", "clicks_bin40", "user_id", "hash", "site", "tags",
        "seen_hour", "seen_weekday",
    ]  # fmt: skip
    assert {one.name: one.operators[0].type for one in found.config.dense} == {
        "price": "log", "age": "standardize", "clicks": "standardize",
    }  # fmt: skip
    assert found.config.categorical[5].encoding.min_count == 10  # one positive is expected in so many rows


def test_what_is_written_has_no_defaults_and_means_the_same() -> None:
    found = infer_config(TABLE, ["click"], categories=["age"])
    data = as_written(found.config)
    assert etl.EtlConfig.from_dict(data) == found.config
    assert data["input"]["columns"][1] == {"name": "price", "type": "float"}
    assert data["categorical"][-1] == {"name": "seen_weekday"}
    assert "sample_weight" not in data


def test_of_a_folder_or_pattern_the_first_file_is_read(tmp_path: Path) -> None:
    for n in (1, 0):
        (tmp_path / f"part{n}.csv").write_text(f"click,site{n}\n1,a\n0,b\n")
    for given in (tmp_path, tmp_path / "part*.csv"):
        assert [one.name for one in infer_file(given).columns] == ["click", "site0"]
    (tmp_path / "empty.csv").write_text("click,site\n")
    with pytest.raises(DataError, match=r"(?s)the file has no rows.*empty.csv.*click, site"):
        infer_file(tmp_path / "empty.csv")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.date32(), [19_000, 19_001, None]), (pa.decimal128(9, 2), ["1.50", "2.25", None]),
        (pa.binary(), [b"x", b"y", None]), (pa.uint64(), [2**63, 2**64 - 1, 2**63]),
        (pa.duration("us"), [1, 2, None]), (pa.time64("us"), [1, 2, None]),
    ],
)  # fmt: skip
def test_the_inferred_file_reads_parquet_of_every_type(kind: Any, values: list[Any], tmp_path: Path) -> None:
    if pa.types.is_decimal(kind):
        column: Any = pa.array([None if one is None else decimal.Decimal(one) for one in values], kind)
    else:
        plain = pa.array(values, {pa.date32(): pa.int32(), pa.uint64(): pa.uint64()}.get(kind))
        column = plain.cast(kind)
    columns = {"click": pa.array([0, 1] * 60), "site": ["a", "b", "b"] * 40, "x": pa.concat_arrays([column] * 40)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = infer_file(tmp_path / "rows.parquet")
    assert etl.run(found.config, tmp_path / "rows.parquet", tmp_path / "out", threads=1).rows == {"train": 120}


def test_the_inferred_file_runs_on_the_rows_themselves(tmp_path: Path) -> None:
    found = infer_config(TABLE, ["click"])
    summary = etl.run(found.config, TABLE, tmp_path / "out", threads=1)
    assert summary.rows == {"train": ROWS}
    assert summary.num_ids["site"] == 10


def test_known_kinds_win() -> None:
    found = infer_config(TABLE.select(["click", "age", "user_id"]), ["click"], categories=["age"], numbers=["user_id"])
    assert [(one.name, one.kind) for one in found.columns[1:]] == [("age", "category"), ("user_id", "number")]


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(SchemaError, match="click"):
        infer_config(TABLE, ["clik"])
    with pytest.raises(SchemaError, match="no column to learn from"):
        infer_config(TABLE.select(["click", "same"]), ["click"])


def test_reads_text_packed_text_and_parquet_alike(tmp_path: Path) -> None:
    text = "click;site;price\n" + "".join(f"{n % 2};s{n % 3};{n / 4}\n" for n in range(40))
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    plain = {
        "click": [n % 2 for n in range(40)],
        "site": [f"s{n % 3}" for n in range(40)],
        "price": [n / 4 for n in range(40)],
    }
    pq.write_table(pa.table(plain), tmp_path / "a.parquet")
    kinds = [infer_file(tmp_path / name).columns for name in ("a.csv", "a.csv.gz", "a.parquet")]
    assert kinds[0] == kinds[1] == kinds[2]
    assert infer_file(tmp_path / "a.csv").config.input.delimiter == ";"
    (tmp_path / "bad.csv.gz").write_bytes(gzip.compress(text.encode())[:40])
    with pytest.raises(DataError, match="cannot be read"):
        infer_file(tmp_path / "bad.csv.gz")


def test_the_command_writes_a_file_and_explains_the_columns(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text("bought,site\n1,a\n0,b\n0,a\n")
    run = CliRunner().invoke
    refused = run(app, ["etl", "--infer", str(tmp_path / "clicks.csv")])
    assert isinstance(refused.exception, SchemaError)
    assert "which column is the label" in str(refused.exception)
    arguments = ["--infer", str(tmp_path / "clicks.csv"), "--label", "bought", "--output", str(tmp_path / "etl.json")]
    done = run(app, ["etl", *arguments])
    assert done.exit_code == 0, done.output
    assert "site    category  2 values" in done.stderr
    assert etl.EtlConfig.from_json_file(tmp_path / "etl.json").labels[0].name == "bought"


def test_the_name_of_a_partition_is_a_folder_for_rows_and_no_file_for_settings(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text("click,site\n1,a\n0,b\n0,a\n")
    words = ["etl", str(tmp_path / "clicks.csv"), "--output"]
    refused = CliRunner().invoke(app, [*words, str(tmp_path / "day=1"), "--infer"])
    assert isinstance(refused.exception, ConfigError)
    assert "a partition's folder" in str(refused.exception)
    assert not (tmp_path / "day=1").exists()
    assert CliRunner().invoke(app, [*words, str(tmp_path / "day=1.json"), "--infer"]).exit_code == 0
    done = CliRunner().invoke(app, [*words, str(tmp_path / "day=1"), "--config", str(tmp_path / "day=1.json")])
    assert done.exit_code == 0, done.output
    assert len(Dataset(tmp_path / "day=1" / "train")) == 3


@pytest.mark.parametrize("name", ["etl.yaml", "etl.YML"])
def test_the_command_writes_yaml_where_the_name_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "clicks.csv").write_text("click,site\n1,no\n0,1e-3\n0,1e-3\n")
    words = ["etl", "--infer", str(tmp_path / "clicks.csv"), "--output"]
    for one in (name, "etl.json"):
        assert CliRunner().invoke(app, [*words, str(tmp_path / one)]).exit_code == 0
    text = (tmp_path / name).read_text()
    assert text.startswith("format: viviane-etl\n")
    found = [etl.EtlConfig.from_json_file(tmp_path / one) for one in (name, "etl.json")]
    assert found[0] == found[1]
    monkeypatch.setitem(sys.modules, "yaml", None)
    refused = CliRunner().invoke(app, [*words, str(tmp_path / f"other_{name}")])
    assert isinstance(refused.exception, MissingExtraError)
    assert "another name is written as JSON" in str(refused.exception)
    assert not (tmp_path / f"other_{name}").exists()


def test_whole_numbers_that_are_codes_become_categories_besides() -> None:
    chance = np.random.default_rng(3)
    banner, amount = chance.integers(10_000, 10_200, 8000), chance.integers(0, 200, 8000)
    taste = chance.normal(0, 2, 200)
    click = chance.random(8000) < 1 / (1 + np.exp(2 - taste[banner - 10_000] - amount / 100))
    table = pa.table({"click": click.astype(int), "banner": banner, "amount": amount})
    found = {one.name: one.note for one in infer_config(table, ["click"]).columns}
    assert found["banner"] == "value, 200 exact values, 40 quantiles"
    assert found["amount"] == "value, 10 quantiles, 40 quantiles"


@pytest.mark.parametrize("labels", [[np.nan] * 8000, ["yes", "no"] * 4000])
def test_labels_that_are_no_numbers_tell_nothing_about_codes(labels: list[object]) -> None:
    table = pa.table({"banner": np.arange(8000) % 200, "click": labels})
    target = infer._numbers_of(table.column("click"))
    values = infer._numbers_of(table.column("banner"))
    assert target is None or not infer.identity_matters(values, target, 40)


def test_booleans_are_described_as_such() -> None:
    rows = {"click": [0, 1] * 20, "b": pa.array([True, False] * 20), "n": [0, 2] * 20, "s": ["a", "b"] * 20}
    found = infer_config(plain_table(pa.table(rows)), ["click"])
    assert [(one.kind, one.note) for one in found.columns[1:3]] == [
        ("boolean", "0 and 1"), ("number", "value, 2 exact values"),
    ]  # fmt: skip


def test_a_column_without_any_value_is_ignored() -> None:
    """pandas gives a column of None the type null."""
    table = pa.table({"y": [0, 1] * 5, "none": pa.nulls(10), "b": list("abababcdcd")})
    found = {one.name: (one.kind, one.note) for one in infer_config(table, ["y"]).columns}
    assert found["none"] == ("ignored", "no value")
    assert found["b"][0] == "category"
    with pytest.raises(SchemaError, match="no column to learn from"):
        infer_config(table.select(["y", "none"]), ["y"])
