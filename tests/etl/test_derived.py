"""Columns made row by row: maps, parts of dates, indicators; buckets of unknown values; settings that are refused."""

import hashlib
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import clicks, config, read, text

from viviane.core.errors import ConfigError
from viviane.data import Dataset
from viviane.etl import EtlConfig, FittedEtl, fit, run

COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"},
    {"name": "u"},
    {"name": "t", "type": "timestamp"},
    {"name": "x", "type": "float"},
    {"name": "i", "type": "int"},
    {"name": "tags", "separator": "|"},
]


def derived(*derivations: dict[str, Any], dense: tuple[str, ...] = (), **rest: Any) -> EtlConfig:
    fill = [{"type": "fill", "value": -1}]
    dense_specs = [{"name": f"{name}_", "source": name, "operators": fill} for name in dense]
    rest = {"labels": [{"name": "y"}], "categorical": [{"name": "u"}], **rest}
    return config(COLUMNS, derived=derivations, dense=dense_specs, **rest)


def test_parts_of_dates_against_pandas(tmp_path: Path) -> None:
    parts = ("year", "month", "day", "weekday", "weekend", "hour", "minute")
    moments = [datetime(1969, 12, 31, 23, 59), datetime(2024, 2, 29, 0, 1), datetime(2026, 11, 22, 12), None]
    seconds = [None if one is None else int((one - datetime(1970, 1, 1)).total_seconds()) for one in moments]
    table = pa.table({"y": [0, 1, 0, 1], "u": ["a"] * 4, "t": pa.array(moments, pa.timestamp("us")), "i": seconds})
    pq.write_table(table, tmp_path / "raw.parquet")
    made = [{"type": "date_part", "name": part, "source": "t", "part": part} for part in parts]
    made += [{"type": "date_part", "name": f"{part}_i", "source": "i", "part": part, "unit": "s"} for part in parts]
    names = (*parts, *(f"{part}_i" for part in parts))
    settings_ = derived(*made, dense=names, categorical=[{"name": "hour"}, {"name": "u_hour", "source": ["u", "hour"]}])
    run(settings_, tmp_path / "raw.parquet", tmp_path / "out")
    found = read(tmp_path / "out/train")
    times = pd.Series(moments[:3]).dt
    expected = {part: getattr(times, part).tolist() for part in parts if part != "weekend"}
    expected["weekend"] = [int(day >= 5) for day in expected["weekday"]]
    for part in parts:
        assert found[f"{part}_"] == found[f"{part}_i_"] == [*expected[part], -1]
    assert found["hour"] == [5, 3, 4, 1]  # 0, 12 and 23 o'clock once each
    assert found["u_hour"] == [5, 3, 4, 1]  # as text: 1:01:0, 1:02:12, 1:02:23


def test_maps_rename_values_and_elements(tmp_path: Path) -> None:
    settings_ = derived(
        {"type": "map", "name": "v", "source": "u", "values": {"ios": "apple", "mac": "apple", "?": None}},
        {"type": "map", "name": "n", "source": "u", "values": {"ios": 1, "é中": 2.5}, "result": "float"}
        | {"others": "missing", "missing": 9},
        {"type": "map", "name": "j", "source": "i", "values": {"-3": 7}, "missing": 0},
        {"type": "map", "name": "tag", "source": "tags", "values": {"a": "b"}, "missing": "none"},
        {"type": "missing_indicator", "name": "no_x", "source": "x"},
        {"type": "missing_indicator", "name": "no_v", "source": "v"},
        dense=("n", "j", "no_x", "no_v"),
        categorical=[{"name": "v"}, {"name": "tag", "kind": "multi_hot"}],
    )
    raw = text(tmp_path / "raw.csv", "y,u,x,i,tags\n1,ios,,-3,a|c\n0,mac,2,5,b\n1,?,3,,\n1,é中,,4,a||b\n0,,1,1,c\n")
    run(settings_, raw, tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found["v"] == [3, 3, 1, 4, 1]
    assert found["n_"] == [1.0, -1.0, -1.0, 2.5, 9.0]
    assert found["j_"] == [7.0, 5.0, 0.0, 4.0, 1.0]
    assert found["tag"] == [[3, 4], [3], [1], [3, 5, 3], [4]]  # a list that is not there has no element to rename
    assert found["no_x_"] == [1, 0, 0, 1, 0]
    assert found["no_v_"] == [0, 0, 1, 0, 1]
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    rows = pa.table({"u": ["mac", None], "x": [None, 1.0], "i": [-3, 1], "tags": ["a", "zz"]})
    cleaned = fitted.transform_table(rows).to_pydict()
    assert (cleaned["v"], cleaned["tag"], cleaned["no_x_"]) == ([3, 1], [[3], [2]], [1.0, 0.0])


def test_filters_see_derived_columns_of_one_row(tmp_path: Path) -> None:
    settings_ = derived(
        {"type": "date_part", "name": "hour", "source": "i", "part": "hour", "unit": "s"},
        filters=[{"column": "hour", "keep": "<", "value": 12}],
    )
    raw = text(tmp_path / "raw.csv", f"y,u,i\n1,a,0\n0,b,{13 * 3600}\n1,c,{90000}\n")
    assert run(settings_, raw, tmp_path / "out").filtered == 1


def test_unknown_values_share_several_buckets(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,item\n" + "1,a\n" * 3 + "0,b\n0,c\n1,b\n0,\n1,é\n")
    run(clicks(min_count=2, unknown_buckets=4), raw, tmp_path / "out")

    def bucket(word: str) -> int:
        return 5 + int(hashlib.md5(word.encode()).hexdigest()[:15], 16) % 4

    assert read(tmp_path / "out/train")["item"] == [3, 3, 3, 4, bucket("c"), 4, 1, bucket("é")]
    assert Dataset(tmp_path / "out/train").schema.categorical[0].num_ids == 9
    Dataset(tmp_path / "out/train").check()
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    words = [f"new{i}" for i in range(50)]
    assert fitted.transform_table(pa.table({"item": words}))["item"].to_pylist() == [bucket(word) for word in words]


def test_configs_without_derived_columns_keep_their_files(tmp_path: Path) -> None:
    plain = clicks()
    assert "derived" not in plain.to_dict()
    assert "unknown_buckets" not in plain.to_dict()["categorical"][0]["encoding"]
    many = derived({"type": "count", "name": "n", "by": "u"}, dense=("n",))
    assert EtlConfig.from_dict(many.to_dict()) == many


@pytest.mark.parametrize(
    ("derivation", "message"),
    [
        ({"type": "count", "name": "n", "by": "w"}, "no input column 'w'; choose"),
        ({"type": "count", "name": "n", "by": "x"}, "key column 'x' is of type float: give single string, int or hex"),
        ({"type": "count", "name": "n", "by": ["u", "u"]}, "names a column of its key twice"),
        ({"type": "count", "name": "x", "by": "u"}, "derived column 'x' occurs twice"),
        ({"type": "count", "name": "n", "by": "y"}, "'n' would hold the label of column 'y': use target_encode"),
        ({"type": "group_statistics", "name": "n", "by": "u", "of": "y"}, "'n' would hold the label"),
        ({"type": "group_statistics", "name": "n", "by": "u", "of": "u"}, "column .u. is of type string"),
        ({"type": "target_encode", "name": "n", "by": "u", "target": "z"}, "no label 'z'; choose one of: y"),
        ({"type": "target_encode", "name": "n", "by": "u", "target": ["y", "y"]}, "'n' names a target twice"),
        ({"type": "target_encode", "name": "n", "by": "u", "target": "y", "fold_by": "y"}, "use another fold_by"),
        ({"type": "date_part", "name": "n", "source": "i", "part": "hour"}, 'of type int: add "unit": "s"'),
        ({"type": "date_part", "name": "n", "source": "x", "part": "hour"}, "must hold timestamps or whole numbers"),
        ({"type": "map", "name": "n", "source": "x", "values": {}}, "make it string or int"),
        ({"type": "map", "name": "n", "source": "i", "values": {"a": 1}}, "holds whole numbers"),
        ({"type": "map", "name": "n", "source": "u", "values": {"a": 1}}, "which is not string"),
        ({"type": "map", "name": "n", "source": "u", "values": {"a": 1}, "result": "int"}, '"others": "missing"'),
        ({"type": "difference_lag", "name": "n", "source": "u", "by": "u", "order_by": "t"}, "int, float or timestamp"),
    ],
)
def test_settings_that_cannot_be(derivation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        derived(derivation)


def test_derivations_have_names_of_their_own() -> None:
    one = {"type": "group_statistics", "name": "u", "by": "u"}
    with pytest.raises(ConfigError, match="derivation named twice: u"):
        derived({**one, "of": "x"}, {**one, "of": "i"})


def test_no_rows_and_no_renamed_values(tmp_path: Path) -> None:
    settings_ = derived(
        {"type": "map", "name": "m", "source": "u", "values": {}, "missing": "none"},
        {"type": "count", "name": "n", "by": ["m", "i"]},
        {"type": "difference_lag", "name": "lag", "source": "i", "by": "m", "order_by": "i"},
        dense=("n", "lag"),
    )
    fitted = fit(settings_, text(tmp_path / "raw.csv", "y,u,i\n1,,1\n0,a,1\n0,,4\n"))
    rows = pa.table({"u": [None, "a", "none"], "i": [1, 1, 3]})
    found = fitted.transform_table(rows).to_pydict()
    assert (found["n_"], found["lag_"]) == ([1.0, 1.0, 0.0], [-1.0, -1.0, 2.0])
    assert fitted.transform_table(rows.slice(0, 0)).num_rows == 0


def test_a_filter_cannot_use_what_is_learned_after_it() -> None:
    with pytest.raises(ConfigError, match="'n' is derived"):
        derived({"type": "count", "name": "n", "by": "u"}, filters=[{"column": "n", "keep": ">", "value": 1}])


_KEYS = st.one_of(st.none(), st.sampled_from(["a", "b", "é", "中", "a b"]))


@settings(max_examples=8, deadline=None)
@given(rows=st.lists(st.tuples(_KEYS, st.integers(-(2**62), 2**62), st.integers(0, 3)), min_size=1, max_size=40))
def test_lags_against_pandas(rows: list[tuple[str | None, int, int]]) -> None:
    frame = pd.DataFrame(rows, columns=["u", "i", "x"])
    lags = [
        {"type": "difference_lag", "name": f"lag{n}", "source": "i", "by": "u", "order_by": "x", "shift": n}
        for n in (1, 2)
    ]
    settings_ = derived(*lags, dense=("lag1", "lag2"))
    keys = pa.array([row[0] for row in rows], pa.string())
    table = pa.table({"y": [0] * len(rows), "u": keys, "i": list(frame["i"]), "x": list(frame["x"])})
    with tempfile.TemporaryDirectory() as name:
        pq.write_table(table, Path(name) / "raw.parquet")
        run(settings_, Path(name) / "raw.parquet", Path(name) / "out")
        found = read(Path(name) / "out/train")
        again = FittedEtl.load(Path(name) / "out/etl.zip").transform_table(table).to_pydict()
    ordered = frame.sort_values("x", kind="stable")
    for n in (1, 2):
        before = ordered.groupby("u")["i"].shift(n).reindex(frame.index)
        by_hand = [
            np.float32(-1 if pd.isna(b) or u is None else float(now - int(b)))
            for now, b, u in zip(frame["i"], _exact(ordered, n, len(frame)), keys.to_pylist(), strict=True)
        ]
        assert [b is None or pd.isna(b) for b in before] == [v is None for v in _exact(ordered, n, len(frame))]
        assert found[f"lag{n}_"] == by_hand
        assert again[f"lag{n}_"] == by_hand


def _exact(ordered: pd.DataFrame, shift: int, size: int) -> list[Any]:
    """The value `shift` rows back, as whole numbers: pandas' own would pass through float64."""
    found: list[Any] = [None] * size
    seen: dict[str, list[int]] = {}
    for row, (key, value) in zip(ordered.index, zip(ordered["u"], ordered["i"], strict=True), strict=True):
        if isinstance(key, str):
            past = seen.setdefault(key, [])
            found[row] = past[-shift] if len(past) >= shift else None
            past.append(int(value))
    return found


def test_lag_of_times_is_in_seconds(tmp_path: Path) -> None:
    settings_ = derived(
        {"type": "difference_lag", "name": "since", "source": "t", "by": ["u", "i"], "order_by": "t"}, dense=("since",)
    )
    content = "y,u,t,i\n1,a,2024-01-01 00:00:05.25,1\n0,a,2024-01-01 00:00:01,1\n1,a,,1\n0,a,2024-01-01 00:00:00,2\n"
    fitted = fit(settings_, text(tmp_path / "raw.csv", content))
    run(settings_, tmp_path / "raw.csv", tmp_path / "out")
    assert read(tmp_path / "out/train")["since_"] == [4.25, -1, -1, -1]
    rows = pa.table({"u": ["a", "a"], "t": pa.array([9_000_000, 7_500_000], pa.timestamp("us")), "i": [1, 1]})
    assert fitted.transform_table(rows)["since_"].to_pylist() == [1.5, -1]


def test_the_example_file_runs(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    file = root / "examples" / "etl_derived.json"
    assert file.read_text() in (root / "docs/how-to/etl.md").read_text()
    raw = text(
        tmp_path / "raw.csv",
        "click,user,device,price,time\n1,ann,iphone,2.5,0\n0,bob,ipad,,3600\n0,ann,ipad,3.5,7200\n1,cid,pc,1,90000\n",
    )
    run(EtlConfig.from_json_file(file), raw, tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found["brand"] == [3, 3, 3, 4]
    assert found["no_price"] == [0, 1, 0, 0]
    np.testing.assert_allclose(found["since"], np.log1p([0, 0, 7200, 0]), rtol=2e-7)  # float32
    # bob has no price: he gets the mean of the column, which ann's two rows raise to 7/3
    np.testing.assert_allclose(found["user_price_mean"], [3.0, 7 / 3, 3.0, 1.0], rtol=2e-7)
    Dataset(tmp_path / "out/train").check()
