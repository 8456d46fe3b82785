"""The layout of stored rows and what a tier counts."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viviane.core.errors import ConfigError, StoreError
from viviane.store.row_layout import ITEM_BYTES, Column, RowLayout
from viviane.store.statistics import LatencyHistogram, StatsCounter

columns = st.lists(
    st.builds(
        Column,
        st.text("abcdef_0", min_size=1, max_size=4),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.name,
)


@given(columns)
def test_columns_are_aligned_apart_and_survive_json(given_columns: list[Column]) -> None:
    layout = RowLayout(given_columns)
    owner = np.full(layout.row_bytes, -1)
    for i, one in enumerate(given_columns):
        start = layout.offsets[one.name]
        assert start % ITEM_BYTES[one.dtype] == 0
        assert (owner[start : start + one.num_bytes] == -1).all()
        owner[start : start + one.num_bytes] = i
    assert layout.row_bytes % 8 == 0
    assert layout.row_bytes - (np.flatnonzero(owner >= 0)[-1] + 1) < 8
    read = RowLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert read == layout
    assert read.offsets == layout.offsets
    assert hash(read) == hash(layout)
    rows = layout.zeros(3)
    for one in given_columns:
        layout.column(rows, one.name)[:] = 1
    assert (rows.sum(1) == (owner >= 0).sum()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "another version"),
        ({"version": "1"}, "another version"),
        ({"row_bytes": 24}, "length of rows differs"),
        ({"row_bytes": None}, "length of rows differs"),
        ({"columns": []}, "needs columns"),
        ({"columns": [{"name": "a", "dtype": "float32"}]}, "missing"),
        ({"columns": [{"name": 7, "dtype": "float32", "width": 1}]}, "expected form"),
        ({"columns": [{"name": "a", "dtype": "float31", "width": 1}]}, "unknown type"),
        ({"columns": [{"name": "a", "dtype": "float32", "width": True}]}, "width"),
        ({"columns": [{"name": "a", "dtype": "float32", "width": 1 << 40}]}, "width"),
        ({"columns": [{"name": "a", "dtype": "float64", "width": 1 << 20}]}, "too long"),
        ({"columns": [{"name": "a", "dtype": "float32", "width": 1}] * 2}, "one name"),
    ],
)
def test_a_layout_from_outside_is_checked(change: dict[str, object], message: str) -> None:
    good = RowLayout([Column("weight", "float32", 2)]).to_json()
    with pytest.raises(StoreError, match=message):
        RowLayout.from_json({**good, **change}, where="tier.json", error=StoreError)


def test_calls_are_checked() -> None:
    layout = RowLayout([Column("weight", "float32", 2)])
    keys = np.arange(4)
    layout.check_rows(keys, layout.zeros(4))
    for wrong in (keys.astype(np.int32), keys[::2], keys.reshape(2, 2), [1, 2]):
        with pytest.raises(ConfigError, match="keys have another form"):
            layout.check_keys(wrong)
    for rows in (layout.zeros(3), layout.zeros(4).view(np.int8), layout.zeros(8)[::2], layout.zeros(4)[:, :4]):
        with pytest.raises(ConfigError, match="rows have another form"):
            layout.check_rows(keys, rows)
    with pytest.raises(ConfigError, match="no such column"):
        layout["momentum"]


@given(st.lists(st.floats(1e-6, 500), min_size=1, max_size=50), st.integers(1, 100))
def test_percentiles_are_known_to_a_tenth(seconds: list[float], percent: int) -> None:
    histogram = LatencyHistogram()
    for one in seconds:
        histogram.add(one)
    true = sorted(seconds)[max(0, -(-len(seconds) * percent // 100) - 1)]
    assert true * 0.999 <= histogram.percentile(percent) <= true * 1.1


def test_counts_add_up() -> None:
    counter = StatsCounter(16)
    with counter.fetching() as count:
        count(hits=2, misses=1)
    with counter.putting(5):
        pass
    with pytest.raises(OSError, match="full"), counter.putting(5):
        raise OSError("full")
    counter.erased(2)
    stats = counter.snapshot()
    assert (stats.hits, stats.misses, stats.rows_read, stats.bytes_read) == (2, 1, 2, 32)
    assert (stats.rows_written, stats.bytes_written, stats.rows_erased, stats.puts.num_calls) == (5, 80, 2, 1)
    both = stats.plus(stats).to_json()
    assert both["hits"] == 4
    assert both["bytes_written"] == 160
    assert both["fetch_p50_ms"] >= 0
