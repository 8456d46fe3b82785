"""Values to ids: worked out by hand, and against pandas on generated frames."""

import tempfile
from pathlib import Path

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
from viviane.etl import FittedEtl, fit, run


def test_ids_fall_with_the_count_and_ties_rise_with_the_value(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,item\n1,b\n0,c\n1,c\n0,a\n1,\n0,d\n1,d\n")
    run(clicks(), raw, tmp_path / "out")
    # c and d twice (c first), a and b once (a first); the empty text is missing
    assert read(tmp_path / "out/train")["item"] == [6, 3, 3, 5, 1, 4, 4]
    data = Dataset(tmp_path / "out/train")
    data.check()
    assert data.schema.categorical[0].num_ids == 7
    assert data.info["columns"]["item"]["top_counts"] == [[1, 2], [2, 2], [3, 1], [4, 1]]
    assert data.info["columns"]["item"]["num_missing"] == 1


def test_rare_values_share_the_unknown_id_with_unseen_ones(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,item\n1,b\n0,c\n1,c\n0,a\n")
    run(clicks(min_count=2), raw, tmp_path / "out")
    assert read(tmp_path / "out/train")["item"] == [2, 3, 3, 2]
    new = text(tmp_path / "new.csv", "click,item\n1,c\n0,never\n1,\n")
    FittedEtl.load(tmp_path / "out/etl.zip").transform(new, tmp_path / "new")
    assert read(tmp_path / "new")["item"] == [3, 2, 1]


def test_only_the_most_frequent_values_are_kept(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,item\n1,a\n0,b\n1,b\n0,c\n")
    fitted = fit(clicks(max_values=1), raw)
    assert fitted.transform_table(pa.table({"item": ["a", "b", "c"]}))["item"].to_pylist() == [2, 3, 2]


def test_numbers_keep_their_type(tmp_path: Path) -> None:
    table = pa.table(
        {"i": pa.array([7, 7, -(2**63), 2**63 - 1, None], pa.int64()), "f": [0.5, -0.0, 0.0, float("nan"), 0.5]}
    )
    pq.write_table(table, tmp_path / "raw.parquet")
    settings_ = config(
        [{"name": "i", "type": "int"}, {"name": "f", "type": "float"}], categorical=[{"name": "i"}, {"name": "f"}]
    )
    run(settings_, tmp_path / "raw.parquet", tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found["i"] == [3, 3, 4, 5, 1]
    assert found["f"] == [4, 3, 3, 1, 4]  # 0.0 and -0.0 are one value, NaN is missing; 0.0 < 0.5 at equal counts


def test_columns_share_a_vocabulary(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "a,b\nx,y\nx,z\ny,y\n")
    settings_ = config(
        [{"name": "a"}, {"name": "b"}],
        categorical=[{"name": "a", "vocabulary": "v"}, {"name": "b", "vocabulary": "v"}],
    )
    run(settings_, raw, tmp_path / "out")
    found = read(tmp_path / "out/train")  # y three times, x twice, z once
    assert (found["a"], found["b"]) == ([4, 4, 3], [3, 5, 3])
    assert {column.table for column in Dataset(tmp_path / "out/train").schema.categorical} == {"v"}
    with pytest.raises(ConfigError, match="share a vocabulary but differ"):
        config(
            [{"name": "a"}, {"name": "b", "type": "int"}],
            categorical=[{"name": "a", "vocabulary": "v"}, {"name": "b", "vocabulary": "v"}],
        )


def test_a_cross_numbers_pairs_that_no_separator_can_confuse(tmp_path: Path) -> None:
    rows = pa.table({"a": ["x", "x:", "x", None, "x"], "b": ["1:y", "1y", "1:y", "y", None]})
    pq.write_table(rows, tmp_path / "raw.parquet")
    settings_ = config([{"name": "a"}, {"name": "b"}], categorical=[{"name": "ab", "source": ["a", "b"]}])
    run(settings_, tmp_path / "raw.parquet", tmp_path / "out")
    assert read(tmp_path / "out/train")["ab"] == [3, 4, 3, 1, 1]
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    assert fitted.transform_table(rows.slice(1, 1))["ab"].to_pylist() == [4]


def test_hashes_are_the_same_everywhere_and_missing_stays_missing(tmp_path: Path) -> None:
    import hashlib

    raw = text(tmp_path / "raw.csv", "click,item\n1,pen\n0,ink\n1,\n0,pen\n")
    run(clicks(type="hash", num_ids=1003), raw, tmp_path / "out")
    by_hand = [int(hashlib.md5(word.encode()).hexdigest()[:15], 16) % 1000 + 3 for word in ("pen", "ink")]
    assert read(tmp_path / "out/train")["item"] == [by_hand[0], by_hand[1], 1, by_hand[0]]


def test_buckets_by_borders_and_by_quantiles(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "x\n" + "\n".join(["0", "5", "9.5", "10", "-3", "99", "5", "7"]) + "\n")
    settings_ = config(
        [{"name": "x", "type": "float"}],
        categorical=[
            {"name": "given", "source": "x", "encoding": {"type": "bucketize", "borders": [0, 5, 10]}},
            {"name": "quarter", "source": "x", "encoding": {"type": "bucketize", "quantiles": 4}},
        ],
    )
    run(settings_, raw, tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found["given"] == [4, 5, 5, 6, 3, 6, 5, 5]
    # sorted: -3 0 5 5 7 9.5 10 99; places 2, 4 and 6 hold 5, 7 and 10
    assert found["quarter"] == [3, 4, 5, 6, 3, 6, 4, 5]
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    assert fitted.borders["quarter"] == (5.0, 7.0, 10.0)
    assert fitted.transform_table(pa.table({"x": [None, 1e300]}))["given"].to_pylist() == [1, 6]


def test_criteo_discretisation_feeds_a_category(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "-2,\n1,\n2,\n3,\n100,\n100,\n,\n")
    settings_ = config(
        [{"name": "x", "type": "int"}, {"name": "unused"}],
        categorical=[{"name": "x", "operators": [{"type": "log_square"}]}],
        input={"header": False},
    )
    fitted = fit(settings_, raw)
    learned = fitted.vocabularies["x"]
    found = dict(zip(learned.values.to_pylist(), learned.counts.to_pylist(), strict=True))
    assert found == {1.0: 2, 21.0: 2, -2.0: 1, 2.0: 1}  # floor(ln(100)^2) = 21; 1 and 3 share 1


def test_lists_are_cut_filled_and_weighted(tmp_path: Path) -> None:
    table = pa.table(
        {
            "genres": ["a|b", "", "b", "a||b|c"],
            "history": [[1, 2, 3, 4], [], None, [4, None]],
            "w": [[0.5, 2.0], None, [1.0], [1.0, 2.0, 3.0, 4.0]],
        }
    )
    pq.write_table(table, tmp_path / "raw.parquet")
    settings_ = config(
        [
            {"name": "genres", "separator": "|"},
            {"name": "history", "type": "int", "list": True},
            {"name": "w", "type": "float", "list": True},
        ],
        categorical=[
            {"name": "genres", "kind": "multi_hot"},
            {"name": "history", "kind": "sequence", "max_length": 2},
            {"name": "first", "source": "history", "kind": "multi_hot", "max_length": 1, "keep": "first"},
        ],
    )
    run(settings_, tmp_path / "raw.parquet", tmp_path / "out")
    found = read(tmp_path / "out/train")
    # an empty text inside a list is missing; the empty text is a list of one missing value
    assert found["genres"] == [[4, 3], [1], [3], [4, 1, 3, 5]]
    # 4 twice, then 1, 2, 3; the last two survive; a missing list is one missing value
    assert found["history"] == [[6, 3], [], [1], [3, 1]]
    assert found["first"] == [[4], [], [1], [3]]
    Dataset(tmp_path / "out/train").check()


def test_weights_follow_their_values(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "tags;w\na b c;1 2 3\n;\nc;0.5\n")
    settings_ = config(
        [{"name": "tags", "separator": " "}, {"name": "w", "type": "float", "separator": " "}],
        categorical=[{"name": "tags", "kind": "multi_hot", "weights": "w", "max_length": 2}],
        input={"delimiter": ";"},
    )
    summary = run(settings_, raw, tmp_path / "out")
    found = read(tmp_path / "out/train")
    assert found == {"tags": [[5, 3], [1], [3]], "w": [[2.0, 3.0], [1.0], [0.5]]}
    assert summary.num_cut == {"tags": 1}
    Dataset(tmp_path / "out/train").check()


# Words with delimiters' neighbours, digits and no-breaking traps; the empty text means missing.
_WORDS = st.one_of(
    st.none(), st.text(alphabet="abAB01 .-'\u00e9\u4e2d", min_size=1, max_size=3).filter(lambda w: w.strip() == w)
)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(_WORDS, st.one_of(st.none(), st.integers(-5, 5)), st.floats(-1e6, 1e6)), min_size=1, max_size=60
    ),
    min_count=st.integers(1, 3),
    as_text=st.booleans(),
)
def test_equal_to_pandas(rows: list[tuple[str | None, int | None, float]], min_count: int, as_text: bool) -> None:
    frame = pd.DataFrame(
        {
            "w": pd.array([r[0] for r in rows], object),
            "i": pd.array([r[1] for r in rows], "Int64"),
            "x": [r[2] for r in rows],
        }
    )
    settings_ = config(
        [{"name": "w"}, {"name": "i", "type": "int"}, {"name": "x", "type": "float"}],
        dense=[
            {"name": "log", "source": "x", "operators": [{"type": "log"}]},
            {"name": "z", "source": "x", "operators": [{"type": "standardize"}]},
            {"name": "span", "source": "i", "operators": [{"type": "fill", "value": 0}, {"type": "min_max"}]},
        ],
        categorical=[
            {"name": "w", "encoding": {"type": "categorify", "min_count": min_count}},
            {"name": "i", "encoding": {"type": "categorify", "min_count": min_count}},
        ],
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if as_text:
            frame.to_csv(folder / "raw.csv", index=False)
        else:
            pq.write_table(pa.Table.from_pandas(frame), folder / "raw.parquet")
        run(settings_, folder / ("raw.csv" if as_text else "raw.parquet"), folder / "out")
        found = read(folder / "out/train")
    for column in ("w", "i"):
        counts = frame[column].dropna().value_counts()
        kept = sorted((value for value in counts.index if counts[value] >= min_count), key=lambda v: (-counts[v], v))
        ids = {value: 3 + place for place, value in enumerate(kept)}
        assert found[column] == [1 if pd.isna(value) else ids.get(value, 2) for value in frame[column]]
    x = frame["x"]
    span = frame["i"].fillna(0).astype(float)
    expected = {
        "log": np.log1p(x.clip(lower=0)),
        "z": (x - x.mean()) / (x.std(ddof=0) or 1.0),
        "span": (span - span.min()) / ((span.max() - span.min()) or 1.0),
    }
    for column, values in expected.items():
        # float32 keeps 24 bits; a nearly constant column loses some to cancellation in x - mean
        spread = max(1.0, float(x.abs().max()) / (float(x.std(ddof=0)) or 1.0)) if column == "z" else 1.0
        if spread < 1e6:
            np.testing.assert_allclose(found[column], values.to_numpy(float), rtol=2e-7, atol=1e-7 * spread)
