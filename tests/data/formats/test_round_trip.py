from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from format_rows import ANY_BAGS, ONE_HOT, rows_for, rows_of, schemas
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import SchemaError
from viviane.data import Dataset, write_dataset
from viviane.data.conversion import convert
from viviane.data.formats import Format
from viviane.schema import Schema

SIZES = {"rows_per_group": 5, "rows_per_file": 10}


def check_chain(schema: Schema, rows: dict[str, list[Any]], formats: list[Format]) -> None:
    """Write rows in the first format, convert from each format to the next, and read them after every step."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_dataset(Path(folder) / "0", schema, [rows], format=formats[0], **SIZES)
        assert rows_of(data) == rows
        for number, (_, then) in enumerate(pairwise(formats), 1):
            data = convert(data, Path(folder) / str(number), then, **SIZES)
            again = Dataset(data.path)
            assert again.format == then
            assert again.schema == schema
            assert len(again) == len(rows[schema.column_names[0]])
            assert rows_of(again) == rows


@settings(max_examples=10, deadline=None)
@given(data=st.data(), order=st.permutations(list(ANY_BAGS)))
def test_bags_sequences_wide_keys_and_names(data: st.DataObject, order: list[str]) -> None:
    schema = data.draw(schemas(bags=True))
    check_chain(schema, data.draw(rows_for(schema)), [ANY_BAGS[name] for name in order])


@settings(max_examples=10, deadline=None)
@given(data=st.data(), order=st.permutations(list(ONE_HOT)))
def test_one_hot_columns_pass_through_every_format(data: st.DataObject, order: list[str]) -> None:
    schema = data.draw(schemas(bags=False))
    check_chain(schema, data.draw(rows_for(schema)), [ONE_HOT[name] for name in order])


@pytest.mark.parametrize("name", [name for name in ANY_BAGS if not name.startswith("norm")])
def test_labels_are_not_needed(tmp_path: Path, name: str) -> None:
    schema = Schema.from_dict({"categorical": [{"name": "c", "num_ids": 9}]})
    data = write_dataset(tmp_path / "set", schema, [{"c": [3, 8, 0]}], format=ANY_BAGS[name])
    assert rows_of(data) == {"c": [3, 8, 0]}


@pytest.mark.parametrize("name", ["viviane", "viviane, columns"])
def test_weights(tmp_path: Path, name: str) -> None:
    schema = Schema.from_dict(
        {
            "labels": [{"name": "y", "task": "regression"}],
            "categorical": [{"name": "t", "num_ids": 9, "kind": "multi_hot", "weights": "w"}],
            "sample_weight": "s",
        }
    )
    rows = {"y": [-0.5, 2.0, 0.25], "t": [[1, 8], [], [0]], "w": [[0.5, -1.0], [], [2.0]], "s": [0.0, 1.0, 2.5]}
    data = write_dataset(tmp_path / "set", schema, [rows], format=ANY_BAGS[name], rows_per_group=2)
    assert rows_of(data) == rows
    assert sorted(map(str, rows_of(data, shuffle=True)["s"])) == ["0.0", "1.0", "2.5"]
    assert rows_of(convert(data, tmp_path / "back", "parquet")) == rows


@pytest.mark.parametrize("name", list(ONE_HOT))
def test_one_key_very_often_and_the_largest(tmp_path: Path, name: str) -> None:
    schema = Schema.from_dict({"labels": [{"name": "y"}], "categorical": [{"name": "k", "num_ids": 2**31}]})
    rows = {"y": [1.0] * 100_001, "k": [2**31 - 1] * 100_000 + [0]}
    data = write_dataset(tmp_path / "set", schema, [rows], format=ONE_HOT[name], rows_per_group=30_000)
    found = [key for batch in data.reader(40_000) for key in batch.one_hot[:, 0].tolist()]
    assert found == rows["k"]


def test_raw_ids_keep_all_their_bits_in_the_own_format_and_are_refused_where_a_range_is_needed(tmp_path):
    columns = [{"name": "user", "num_ids": None}, {"name": "seen", "num_ids": None, "kind": "multi_hot"}]
    schema = Schema(labels=[{"name": "y"}], categorical=columns)
    rows = {"y": [0, 1], "user": [-(2**63), 2**63 - 1], "seen": [[0, -1], []]}
    source = write_dataset(tmp_path / "parquet", schema, [rows])
    copy = convert(source, tmp_path / "own", "viviane")
    assert copy.head().one_hot[:, 0].tolist() == rows["user"]
    assert copy.head().bags["seen"].values.tolist() == [0, -1]
    with pytest.raises(SchemaError, match=r"raw ids have no range[\s\S]*'user'"):
        convert(source, tmp_path / "norm", "norm")
