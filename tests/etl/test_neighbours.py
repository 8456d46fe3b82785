"""The value of the row before and after with the same key, against pandas' shift; in files, in memory, on engines."""

import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import config, data_bytes, read

from viviane.etl import EtlConfig, FittedEtl, run

COLUMNS: list[dict[str, Any]] = [
    {"name": "u"},
    {"name": "v", "type": "int"},
    {"name": "t", "type": "int"},
    {"name": "x", "type": "float"},
    {"name": "n", "type": "int"},
    {"name": "w"},
    {"name": "h", "type": "hex"},
]
KINDS = (pa.string(), pa.int64(), pa.int64(), pa.float64(), pa.int64(), pa.string(), pa.string())
HUGE = [2**62 + 1, 2**62, -(2**63), 5]
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.sampled_from([1, 2, None]),
        st.one_of(st.none(), st.integers(0, 4)),
        st.one_of(st.none(), st.floats(-9, 9, width=16)),
        st.sampled_from([*HUGE, None]),
        st.sampled_from(["p", "é", "", None]),
        st.sampled_from(["ff", "ffffffffffffffff", None]),
    ),
    min_size=1,
    max_size=25,
)


def shifted(by: list[str], shift: int) -> EtlConfig:
    """Both directions of a number, a whole number beyond 2^53, a text and a hexadecimal number."""
    derived = [
        {"type": kind, "name": f"{kind}_{name}", "source": name, "by": by, "order_by": "t", "shift": shift}
        for kind in ("lag", "lead")
        for name in ("x", "n", "w", "h")
    ]
    ids = {"encoding": {"type": "raw", "missing": -7}}
    return config(
        COLUMNS,
        derived=derived,
        dense=[{"name": f"{k}_x", "operators": [{"type": "fill", "value": -7}]} for k in ("lag", "lead")],
        categorical=[{"name": f"{k}_{name}", **ids} for k in ("lag", "lead") for name in ("n", "h")]
        + [{"name": f"{k}_w", "encoding": {"type": "categorify"}} for k in ("lag", "lead")],
    )


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table({c["name"]: pa.array(v, kind) for c, v, kind in zip(COLUMNS, columns, KINDS, strict=True)})


def wanted(table: pa.Table, by: list[str], shift: int) -> dict[str, list[Any]]:
    """By pandas: rows with key and time, stably sorted by time, moved within their key."""
    frame = pd.DataFrame({name: pd.Series(table[name].to_pylist(), dtype=object) for name in table.column_names})
    known = frame.dropna(subset=[*by, "t"]).sort_values("t", kind="stable")
    found: dict[str, list[Any]] = {}
    for kind, step in (("lag", shift), ("lead", -shift)):
        for name in ("x", "n", "w", "h"):
            moved = known.groupby(by)[name].shift(step).reindex(frame.index).astype(object)
            found[f"{kind}_{name}"] = [None if pd.isna(one) else one for one in moved]
    return found


@settings(max_examples=5, deadline=None)
@given(rows=ROWS, by=st.sampled_from([["u"], ["u", "v"]]), shift=st.sampled_from([1, 3]))
def test_equal_to_pandas(rows: list[tuple[Any, ...]], by: list[str], shift: int) -> None:
    table = table_of(rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table, folder / "raw.parquet")
        run(shifted(by, shift), folder / "raw.parquet", folder / "out")
        found = read(folder / "out/train")
        fitted = FittedEtl.load(folder / "out/etl.zip")
        assert fitted.transform_table(table).to_pydict() == found
    for name, values in wanted(table, by, shift).items():
        if name.endswith("_w"):
            words = fitted.vocabularies[name].values.to_pylist()
            expected = [words.index(one) + 3 if one else 1 for one in values]  # an empty text is missing
        elif name.endswith("_h"):
            whole = [None if one is None else int(one, 16) for one in values]
            expected = [-7 if one is None else one - (1 << 64) * (one >= 1 << 63) for one in whole]
        else:
            expected = [-7 if one is None else one for one in values]
        assert found[name] == expected, name


def test_rows_of_other_files_and_filtered_rows_are_neighbours(tmp_path: Path) -> None:
    for number, rows in enumerate(("a,1,1\na,2,2\n", "a,0,3\nb,9,9\n")):
        (tmp_path / f"{number}.csv").write_text("u,t,x\n" + rows)
    settings_ = config(
        [{"name": "u"}, {"name": "t", "type": "int"}, {"name": "x", "type": "float"}],
        derived=[{"type": kind, "name": kind, "source": "x", "by": "u", "order_by": "t"} for kind in ("lag", "lead")],
        dense=[{"name": kind, "operators": [{"type": "fill", "value": -1}]} for kind in ("lag", "lead")],
        filters=[{"column": "x", "keep": "!=", "value": 1}],
    )
    for engine, device in (("duckdb", None), ("gpu", "cpu")):
        run(settings_, tmp_path / "*.csv", tmp_path / engine, engine=engine, device=device)
    assert read(tmp_path / "duckdb/train") == {"lag": [1.0, -1.0, -1.0], "lead": [-1.0, 1.0, -1.0]}
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "w2"}, "no input column 'w2'"),
        ({"source": "l"}, "'near': column 'l' must hold one number or text a row"),
        ({"source": "t"}, "of times there is difference_lag"),
        ({"order_by": "u"}, "column 'u' must hold one int, float or timestamp"),
        ({"by": "x"}, "key column 'x' is of type float"),
        ({"shift": 0}, "greater than or equal to 1"),
        ({"source": "y"}, "would hold the label"),
    ],
)
def test_what_has_no_neighbour_is_refused(change: dict[str, Any], message: str) -> None:
    columns = [{"name": "u"}, {"name": "t", "type": "timestamp"}, {"name": "x", "type": "float"}]
    columns += [{"name": "l", "list": True}, {"name": "y", "type": "int"}]
    one = {"type": "lead", "name": "near", "source": "x", "by": "u", "order_by": "t", **change}
    with pytest.raises(ValueError, match=message):
        config(columns, labels=[{"name": "y"}], derived=[one], categorical=[{"name": "u"}])
