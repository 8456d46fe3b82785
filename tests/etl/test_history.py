"""Histories of earlier rows, optional labels, functions by name: against plain loops and pandas."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import config, data_bytes, read, text

import viviane.etl.derive
from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset
from viviane.etl import EtlConfig, FittedEtl, fit, register_function, run

COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"},
    {"name": "u"},
    {"name": "v", "type": "int"},
    {"name": "t", "type": "int"},
    {"name": "i", "type": "int"},
]
CLICKED = {"column": "y", "keep": "==", "value": 1}


def histories(*derivations: dict[str, Any], lists: tuple[str, ...], **rest: Any) -> EtlConfig:
    rest = {"labels": [{"name": "y"}], **rest}
    raw = {"type": "raw", "missing": -1}
    bags = [{"name": f"{name}_", "source": name, "kind": "multi_hot", "encoding": raw} for name in lists]
    return config(
        COLUMNS, derived=derivations, categorical=[*bags, {"name": "i_", "source": "i", "encoding": raw}], **rest
    )


def by_hand(rows: list[tuple[Any, ...]], keys: list[Any], last: int, clicked: bool) -> list[list[int]]:
    """Row by row: the values of the rows of the key with a smaller time."""
    found = []
    for n, row in enumerate(rows):
        if keys[n] is None or row[3] is None:
            found.append([])
            continue
        earlier = [
            (other[3], m, other[4])
            for m, other in enumerate(rows)
            if keys[m] == keys[n] and other[3] is not None and other[3] < row[3]
        ]
        values = [value for _, m, value in sorted(earlier, key=lambda one: one[:2]) if value is not None]
        if clicked:
            values = [i for _, m, i in sorted(earlier, key=lambda one: one[:2]) if i is not None and rows[m][0] == 1]
        found.append(values[-last:])
    return found


_ROWS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(st.none(), st.sampled_from(["a", "b", "é", "中", "1:a"])),
        st.one_of(st.none(), st.integers(0, 1)),
        st.one_of(st.none(), st.integers(-3, 3)),
        st.one_of(st.none(), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=12, deadline=None)
@given(rows=_ROWS, last=st.integers(1, 4), cross=st.booleans(), at_once=st.sampled_from([1, 3, 100]))
def test_histories_against_a_loop(rows: list[tuple[Any, ...]], last: int, cross: bool, at_once: int) -> None:
    by = ["u", "v"] if cross else "u"
    settings_ = histories(
        {"type": "history", "name": "h", "source": "i", "by": by, "order_by": "t", "last": last},
        {"type": "history", "name": "c", "source": "i", "by": by, "order_by": "t", "last": last, "where": CLICKED},
        lists=("h", "c"),
    )
    kinds = (pa.int64(), pa.string(), pa.int64(), pa.int64(), pa.int64())
    cells = zip(*rows, strict=True)
    table = pa.table({c["name"]: pa.array(one, k) for c, one, k in zip(COLUMNS, cells, kinds, strict=True)})
    usual = viviane.etl.derive._ROWS_AT_ONCE
    viviane.etl.derive._ROWS_AT_ONCE = at_once  # keys that continue over several pieces
    try:
        with tempfile.TemporaryDirectory() as name:
            pq.write_table(table, Path(name) / "raw.parquet")
            run(settings_, Path(name) / "raw.parquet", Path(name) / "out")
            found = read(Path(name) / "out/train")
            again = FittedEtl.load(Path(name) / "out/etl.zip").transform_table(table).to_pydict()
    finally:
        viviane.etl.derive._ROWS_AT_ONCE = usual
    keys = [None if None in row[1:3] else row[1:3] for row in rows] if cross else [row[1] for row in rows]
    for column, clicked in (("h_", False), ("c_", True)):
        wanted = by_hand(rows, keys, last, clicked)
        assert found[column] == wanted
        assert again[column] == wanted


def test_a_history_and_its_target_share_a_vocabulary(tmp_path: Path) -> None:
    columns = [{"name": "y", "type": "int"}, {"name": "u"}, {"name": "item"}, {"name": "t", "type": "timestamp"}]
    settings_ = config(
        columns,
        labels=[{"name": "y", "optional": True}],
        derived=[{"type": "history", "name": "past", "source": "item", "by": "u", "order_by": "t", "last": 2}
                 | {"where": CLICKED}],
        categorical=[
            {"name": "item", "vocabulary": "item"},
            {"name": "past", "kind": "sequence", "max_length": 2, "vocabulary": "item"},
        ],
    )  # fmt: skip
    raw = text(
        tmp_path / "raw.csv",
        "y,u,item,t\n1,a,pen,2024-01-01 00:00:00\n0,a,ink,2024-01-01 00:00:01\n1,a,pen,2024-01-01 00:00:02\n"
        "1,a,cup,2024-01-01 00:00:02\n,a,ink,2024-01-02 00:00:00\n0,b,ink,2024-01-02 00:00:00\n",
    )
    run(settings_, raw, tmp_path / "out")
    found = read(tmp_path / "out/train")
    # pen occurs twice as a target and five times in histories, cup and ink as targets
    pen, cup, ink = 3, 5, 4
    assert found["item"] == [pen, ink, pen, cup, ink, ink]
    assert found["past"] == [[], [pen], [pen], [pen], [pen, cup], []]
    assert found["y"] == [1, 0, 1, 1, -1, 0]
    data = Dataset(tmp_path / "out/train")
    data.check()
    assert data.schema.labels[0].optional
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    rows = pa.table({"u": ["a", "a"], "item": ["cup", "pen"], "t": ["2025-01-01", "2025-01-02"], "y": [1, None]})
    assert fitted.transform_table(rows)["past"].to_pylist() == [[], [cup]]


def test_optional_labels_take_no_part_in_target_encoding(tmp_path: Path) -> None:
    encode = {"type": "target_encode", "name": "rate", "by": "u", "target": "y", "folds": 2, "smoothing": 0}
    dense = [{"name": "rate"}]
    settings_ = config(COLUMNS, labels=[{"name": "y", "optional": True}], derived=[encode], dense=dense)
    content = "y,u\n1,a\n0,a\n,a\n1,b\n,c\n"
    fitted = fit(settings_, text(tmp_path / "raw.csv", content))
    rows = pa.table({"u": ["a", "b", "c", "d"]})
    # c has no label at all: like d it gets the mean of the three that are there
    np.testing.assert_allclose(fitted.transform_table(rows)["rate"].to_pylist(), [0.5, 1, 2 / 3, 2 / 3], rtol=1e-7)
    with pytest.raises(ConfigError, match="only binary labels are optional"):
        config(COLUMNS, labels=[{"name": "i", "optional": True, "task": "regression"}], dense=[{"name": "t"}])
    assert "optional" not in config(COLUMNS, labels=[{"name": "y"}], dense=[{"name": "t"}]).to_dict()["labels"][0]


@register_function("test: ratio")
def _ratio(a: Any, b: Any) -> Any:
    return pc.divide(pc.cast(a, pa.float64()), pc.cast(b, pa.float64()))


@register_function("test: letters")
def _letters(words: Any) -> Any:
    return [None if word is None else list(word) for word in words.to_pylist()]


@register_function("test: short")
def _short(words: Any) -> Any:
    return words.slice(1)


def test_functions_by_name(tmp_path: Path) -> None:
    settings_ = config(
        COLUMNS,
        labels=[{"name": "y"}],
        derived=[
            {"type": "function", "name": "r", "source": ["i", "v"], "function": "test: ratio"},
            {"type": "function", "name": "l", "source": "u", "function": "test: letters", "result": "string"}
            | {"list": True},
        ],
        dense=[{"name": "r", "operators": [{"type": "fill", "value": -5}]}],
        categorical=[{"name": "l", "kind": "multi_hot"}],
        filters=[{"column": "r", "keep": "!=", "value": 9}],
    )
    assert EtlConfig.from_dict(settings_.to_dict()) == settings_
    raw = text(tmp_path / "raw.csv", "y,u,v,i\n1,ab,2,3\n0,,4,\n1,é中a,4,1\n0,z,1,9\n")
    assert run(settings_, raw, tmp_path / "out").filtered == 2  # a missing number satisfies no comparison
    found = read(tmp_path / "out/train")
    assert found["r"] == [1.5, 0.25]
    assert found["l"] == [[3, 4], [5, 6, 3]]  # a occurs twice; b, é and 中 once


def test_functions_that_are_not_there_or_go_wrong(tmp_path: Path) -> None:
    one = {"type": "function", "name": "r", "source": "u", "function": "test: short", "result": "string"}
    with pytest.raises(ConfigError, match=r"no function 'nowhere' is registered; known: .*import the module"):
        config(COLUMNS, derived=[{**one, "function": "nowhere"}], dense=[{"name": "t"}])
    raw = text(tmp_path / "raw.csv", "u,t\na,1\nb,2\n")
    for change, message in (
        ({}, "another number of rows"),
        ({"function": "test: letters"}, "values of another type"),
        ({"function": "test: ratio", "result": "float"}, "function failed"),
    ):
        settings_ = config(COLUMNS, derived=[{**one, **change}], dense=[{"name": "t"}])
        with pytest.raises(DataError, match=message):
            fit(settings_, raw)


def test_bytes_do_not_depend_on_threads_and_histories_resume(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},u{rng.integers(50)},1,{rng.integers(1000)},{rng.integers(90)}" for _ in range(3000)]
    raw = text(tmp_path / "raw.csv", "y,u,v,t,i\n" + "\n".join(lines) + "\n")
    settings_ = histories(
        {"type": "history", "name": "h", "source": "i", "by": "u", "order_by": "t", "last": 5}, lists=("h",)
    )
    run(settings_, raw, tmp_path / "one", threads=1)
    run(settings_, raw, tmp_path / "four", threads=4, memory_limit="1GB")
    assert data_bytes(tmp_path / "one") == data_bytes(tmp_path / "four")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "tags"}, "column 'tags' must hold one number or text"),
        ({"order_by": "u"}, "column 'u' must hold one int, float or timestamp"),
        ({"where": {"column": "tags", "keep": "present"}}, "where, 'tags', is a list"),
        ({"by": "tags"}, "key column 'tags' is a list"),
        ({"last": 0}, "greater than or equal to 1"),
    ],
)
def test_histories_that_cannot_be(change: dict[str, Any], message: str) -> None:
    one = {"type": "history", "name": "h", "source": "i", "by": "u", "order_by": "t", "last": 2, **change}
    columns = [*COLUMNS, {"name": "tags", "separator": "|"}]
    with pytest.raises(ConfigError, match=message):
        config(columns, derived=[one], dense=[{"name": "t"}])
