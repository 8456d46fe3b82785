"""Parts of lists and their padding, against Python's own slices."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import config, data_bytes, read

from viviane.etl import EtlConfig, FittedEtl, run
from viviane.etl.deriving import add_row_columns

LISTS = st.lists(
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=7)), min_size=1, max_size=12
)
PLACES = st.one_of(st.none(), st.integers(-8, 8))


def sliced(**settings: Any) -> EtlConfig:
    return config(
        [{"name": "l", "type": "int", "list": True}],
        derived=[{"type": "list_slice", "name": "s", "source": "l", **settings}],
        categorical=[{"name": "s", "kind": "multi_hot", "encoding": {"type": "raw", "missing": 0}}],
    )


@given(
    lists=LISTS, start=st.integers(-8, 8), end=PLACES, more=st.integers(0, 3), side=st.sampled_from(["left", "right"]),
    value=st.one_of(st.none(), st.integers(-99, 99)), cut=st.integers(0, 3),
)  # fmt: skip
def test_equal_to_python(
    lists: list[Any], start: int, end: int | None, more: int, side: str, value: int | None, cut: int
) -> None:
    settings: dict[str, Any] = {"start": start, "end": end}
    every = [len(range(size)[start:end]) for size in range(40)]
    if max(every) == 0:
        with pytest.raises(ValueError, match="no list has a value"):
            sliced(**settings)
        return
    probe = sliced(**settings)
    bound = probe.derived[0].longest  # type: ignore[union-attr]
    assert bound is None or all(len((one or [])[start:end]) <= bound for one in lists)
    assert bound == (max(every) if max(every) < 20 else None)
    if bound is not None:
        settings |= {"pad_to": bound + more, "pad_side": side, "pad_value": value}
    made = sliced(**settings)
    raw = pa.table({"l": pa.array([None] * cut + lists, pa.list_(pa.int64()))}).slice(cut)
    found = add_row_columns(raw, made, {})["s"].to_pylist()
    for one, got in zip(lists, found, strict=True):
        if one is None:
            assert got is None
            continue
        part = one[start:end]
        padding = [value] * (max(0, bound + more - len(part)) if bound is not None else 0)
        assert got == (padding + part if side == "left" and bound is not None else part + padding)


def test_padded_lists_are_vectors_and_have_one_hotness(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "x": pa.array([[1.0, 2.0, 3.0, 4.0], [5.0], [], None], pa.list_(pa.float64())),
            "w": pa.array([["a", "b", "a", "c"], ["a"], [], None], pa.list_(pa.string())),
        }
    )
    pq.write_table(rows, tmp_path / "raw.parquet")
    last: dict[str, Any] = {"type": "list_slice", "start": -3, "pad_to": 3, "pad_side": "left"}
    made = config(
        [{"name": "x", "type": "float", "list": True}, {"name": "w", "list": True}],
        derived=[
            {**last, "name": "xs", "source": "x", "pad_value": 0},
            {**last, "name": "ws", "source": "w"},
            {"type": "map", "name": "wm", "source": "ws", "values": {"b": "z"}, "missing": "pad"},
        ],
        dense=[{"name": "xs", "dim": 3, "operators": [{"type": "fill", "value": -1}]}],
        categorical=[
            {"name": "ws", "kind": "multi_hot", "hotness": 3},
            {"name": "wm", "kind": "sequence", "max_length": 3},
        ],
    )
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(made, tmp_path / "raw.parquet", tmp_path / engine, engine=engine, device=device)
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")
    found = read(tmp_path / "duckdb/train")
    assert found["xs"] == [[2.0, 3.0, 4.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]
    assert found["ws"][:3] == [[4, 3, 5], [1, 1, 3], [1, 1, 1]]
    assert len(found["ws"][3]) == 3
    fitted = FittedEtl.load(tmp_path / "duckdb/etl.zip")
    assert fitted.vocabularies["wm"].values.to_pylist() == ["pad", "a", "c", "z"]
    assert fitted.transform_table(rows).to_pydict() == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "n"}, "column 'n' is no list"),
        ({"start": 3, "end": 2}, "no list has a value from 3 to 2"),
        ({"pad_value": 1}, "add pad_to"),
        ({"pad_to": 3}, "lists may be longer than pad_to 3"),
        ({"end": 5, "pad_to": 3}, "lists may be longer than pad_to 3"),
        ({"end": 2, "pad_to": 3, "pad_value": "x"}, "pad_value 'x' is not int"),
        ({"end": 2, "pad_to": 3, "pad_value": 2**63}, "is not int of 64 bits"),
        ({"end": 2, "pad_to": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_sliced_or_padded_is_refused(change: dict[str, Any], message: str) -> None:
    one = {"type": "list_slice", "name": "s", "source": "l", **change}
    columns = [{"name": "l", "type": "int", "list": True}, {"name": "n", "type": "int"}]
    with pytest.raises(ValueError, match=message):
        config(columns, derived=[one], categorical=[{"name": "n"}])


def test_a_vector_needs_its_length() -> None:
    with pytest.raises(ValueError, match="'s' is derived: labels, weights, vectors"):
        config(
            [{"name": "l", "type": "int", "list": True}],
            derived=[{"type": "list_slice", "name": "s", "source": "l", "end": 2, "pad_to": 3}],
            dense=[{"name": "s", "dim": 2}],
        )
