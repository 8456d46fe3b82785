"""Staged columns in slabs: the same values, in memory of their own."""

import numpy as np
import pyarrow as pa
import pytest

from viviane.etl import slabs
from viviane.etl.slabs import Slabs


def columns(rows: int, seed: int) -> pa.Table:
    noise = np.random.default_rng(seed)
    missing = noise.random(rows) < 0.3
    texts = [None if none else "t" * int(n) for n, none in zip(noise.integers(0, 9, rows), missing, strict=True)]
    return pa.table(
        {
            "number": pa.array(noise.normal(size=rows + 3), mask=np.append(missing, [True, False, True]))[3:],
            "key": pa.array(noise.integers(0, 2**63, rows).astype(np.uint64)),
            "time": pa.array(noise.integers(0, 10**15, rows), pa.timestamp("us")),
            "text": pa.array(texts, pa.string()),
            "tags": pa.array([[1.0, 2.0], None, []] * (rows // 3) + [None] * (rows % 3), pa.list_(pa.float64())),
            "flag": pa.array(missing),
            "pieces": pa.chunked_array([np.zeros(1), np.ones(rows - 1)]),
        }
    )


def test_tables_keep_their_values_while_later_ones_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_LEAST_BYTES", 1)
    monkeypatch.setattr(slabs, "_SLAB_BYTES", 40_000)  # a table takes several
    store = Slabs()
    tables = [columns(rows, seed) for seed, rows in enumerate((2, 1000, 7, 999, 1001))]
    stored = [store.store(table) for table in tables]
    for before, after in zip(tables, stored, strict=True):
        after.validate(full=True)
        assert after.equals(before)
        assert after.schema.equals(before.schema)


def test_large_tables_move_and_small_ones_stay() -> None:
    small, large = pa.table({"x": np.arange(10)}), pa.table({"x": np.arange(100_000)})
    store = Slabs()
    assert store.store(small) is small
    places = [table.column(0).chunk(0).buffers()[1].address for table in (large, store.store(large))]
    assert places[0] != places[1]
