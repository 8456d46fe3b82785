"""Booleans in every spelling and form, and labels of text, from files, in memory, and inferred."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import config, data_bytes, read, text

from viviane.core.errors import DataError, SchemaError
from viviane.etl import EtlConfig, FittedEtl, infer_config, infer_file, run

SPELLED = {
    1: ["true", "True", "TRUE", "t", "yes", "Y", "1", " true "],
    0: ["false", "False", "f", "NO", "n", "0", "F"],
    None: [""],
}


def booleans(**input: Any) -> EtlConfig:
    """A boolean as a dense column, as a category, as a key and as a label."""
    return config(
        [{"name": "b", "type": "bool"}, {"name": "y", "type": "bool"}],
        input=input,
        labels=[{"name": "y"}],
        derived=[
            {"type": "map", "name": "word", "source": "b", "values": {"1": "on", "0": "off"}, "result": "string",
             "others": "missing"},
            {"type": "count", "name": "same", "by": "b"},
            {"type": "missing_indicator", "name": "none", "source": "b"},
        ],
        dense=[{"name": "x", "source": "b", "operators": [{"type": "fill", "value": -1}]}, {"name": "none"}],
        categorical=[{"name": "b"}, {"name": "word"}],
    )  # fmt: skip


@pytest.mark.parametrize("quote", [None, '"'])
def test_every_spelling(tmp_path: Path, quote: str | None) -> None:
    values = [(one, spelling) for one, spellings in SPELLED.items() for spelling in spellings]
    raw = text(tmp_path / "raw.csv", "b,y\n" + "".join(f"{spelling},true\n" for _, spelling in values))
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(booleans(quote=quote), raw, tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    found = read(tmp_path / "duckdb/train")
    assert found["x"] == [-1 if one is None else one for one, _ in values]
    assert found["b"] == [{1: 3, 0: 4, None: 1}[one] for one, _ in values]
    assert found["word"] == found["b"]
    assert found["y"] == [1.0] * len(values)


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.string(), pa.large_string()])
def test_every_form_in_parquet_and_in_memory(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([1, 0, None, 1], pa.int64())
    column = values.cast(pa.bool_()).cast(kind) if kind != pa.uint64() else values.cast(kind)
    table = pa.table({"b": column, "y": pa.array([True, False, True, False])})
    pq.write_table(table, tmp_path / "raw.parquet")
    run(booleans(), tmp_path / "raw.parquet", tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert (found["x"], found["y"]) == ([1.0, 0.0, -1.0, 1.0], [1.0, 0.0, 1.0, 0.0])
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    assert fitted.transform_table(table).to_pydict() == found


@pytest.mark.parametrize("cell", ["2", "maybe", "tru", "1.0", "-1", "true;"])
def test_other_cells_are_malformed_rows(tmp_path: Path, cell: str) -> None:
    raw = text(tmp_path / "raw.csv", f"b,y\n1,1\n{cell},1\n")
    with pytest.raises(DataError, match=r"(?s)not true or false, t or f.*line 3, column 'b'"):
        run(booleans(), raw, tmp_path / "out")
    pq.write_table(pa.table({"b": [1, 2], "y": [1, 0]}), tmp_path / "raw.parquet")
    assert run(booleans(), tmp_path / "raw.parquet", tmp_path / "out", on_bad_row="reject").rejected == 1
    pq.write_table(pa.table({"b": [1.5], "y": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="type that the config does not expect"):
        run(booleans(), tmp_path / "other.parquet", tmp_path / "third")


def worded(label: dict[str, Any]) -> EtlConfig:
    return config(
        [{"name": "y"}, {"name": "u"}],
        labels=[{"name": "clicked", "source": "y", **label}],
        derived=[{"type": "target_encode", "name": "rate", "by": "u", "target": "clicked", "smoothing": 0}],
        dense=[{"name": "rate"}],
        categorical=[{"name": "u"}],
    )


ROWS = "y,u\nbuy,a\nview,a\nclick,b\nbuy,b\n"


def test_labels_of_text(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", ROWS)
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(worded({"positive": ["buy", "click"]}), raw, tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    assert read(tmp_path / "duckdb/train")["clicked"] == [1.0, 0.0, 1.0, 1.0]
    fitted = FittedEtl.load(tmp_path / "duckdb/etl.zip")
    again = fitted.transform_table(pa.table({"u": ["a", "b"]}))
    assert again["rate"].to_pylist() == [0.5, 1.0]
    assert fitted.transform_table(pa.table({"u": ["a"], "y": ["other"]}))["clicked"].to_pylist() == [0.0]


def test_unknown_and_missing_labels(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", ROWS + ",a\n")
    with pytest.raises(DataError, match=r"(?s)the label is missing.*line 6"):
        run(worded({"positive": ["buy"]}), raw, tmp_path / "out")
    with pytest.raises(DataError, match=r"(?s)a label is none of 'buy', 'view'.*line 4, column 'y'"):
        run(worded({"positive": ["buy"], "negative": ["view"]}), raw, tmp_path / "out")
    both = {"positive": ["buy"], "negative": ["view"], "optional": True}
    assert run(worded(both), raw, tmp_path / "out", on_bad_row="reject").rejected == 1
    assert read(tmp_path / "out/train")["clicked"] == [1.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({}, 'for a label of text give "positive"'),
        ({"negative": ["view"]}, "name the positive ones too"),
        ({"positive": ["a"], "negative": ["a"]}, "both positive and negative"),
        ({"positive": ["a"], "operators": [{"type": "log"}]}, "takes no operators"),
        ({"positive": ["a"], "task": "regression"}, "is binary"),
    ],
)
def test_wrong_labels_of_text_are_refused(label: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worded(label)
    with pytest.raises(ValueError, match="'y' is a label of text, but column 'y' is int"):
        config(
            [{"name": "y", "type": "int"}],
            labels=[{"name": "y", "positive": ["a"]}],
            dense=[{"name": "x", "source": "y"}],
        )


def test_they_are_inferred(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,u,b\n" + "yes,a,true\nno,b,false\nno,a,\n" * 9)
    found = infer_file(raw)
    assert found.columns[0].note == "1 where 'yes', 0 where 'no'"
    run(found.config, raw, tmp_path / "out")
    assert read(tmp_path / "out/train")["click"][:3] == [1.0, 0.0, 0.0]
    with pytest.raises(SchemaError, match="a label of text has two values"):
        infer_config(pa.table({"click": ["a", "b", "c"], "u": [1, 2, 3]}), ["click"])
