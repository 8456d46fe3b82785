"""Rows held in memory: what is counted and numbered there, by hand and against NumPy."""

import numpy as np
import pyarrow as pa
import pytest

from viviane.etl.columns import CategoricalSpec
from viviane.etl.held import IDS, Counting, HeldRows


def test_ids_follow_the_counts_of_training_rows() -> None:
    tables = [pa.table({"x": ["b", "a", None, "a"]}), pa.table({"x": ["c", "b", "z", "z"]})]
    training = [np.array([True] * 4), np.array([True, True, False, False])]
    rows = HeldRows(tables, training)
    found = rows.counts(Counting([CategoricalSpec(name="y", source="x")], 1, 2))
    assert found.to_pydict() == {"value": ["a", "b"], "count": [2, 2]}
    shards = [rows.with_ids(number, table).column(f"{IDS}y").to_pylist() for number, table in enumerate(tables)]
    assert shards == [[4, 3, 1, 3], [2, 4, 2, 2]]


@pytest.mark.parametrize(
    ("power", "min_count", "share_missing"), [(1.0, 2, 0.0), (1.5, 6, 0.1), (3.0, 3, 0.2), (1.0, 1, 0.1), (6.0, 6, 0.1)]
)
def test_rare_values_are_left_out_as_if_all_were_counted(power: float, min_count: int, share_missing: float) -> None:
    """Enough rows that rare values, where they are many, are recognized by their hash beforehand."""
    noise = np.random.default_rng(min_count)
    keys = (60_000 * noise.random(70_000) ** power).astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    missing = noise.random(len(keys)) < share_missing
    training = noise.random(len(keys)) < 0.8
    cut = 30_001
    tables = [pa.table({"x": pa.array(keys, mask=missing)[part]}) for part in (slice(cut), slice(cut, None))]
    rows = HeldRows(tables, [training[:cut], training[cut:]])
    found = rows.counts(Counting([CategoricalSpec(name="x")], min_count, None))
    values, numbers = np.unique(keys[training & ~missing], return_counts=True)
    order = np.lexsort((values, -numbers))
    order = order[numbers[order] >= min_count]
    assert (found.column("value").to_numpy() == values[order]).all()
    assert (found.column("count").to_numpy() == numbers[order]).all()
    ids = dict(zip(values[order].tolist(), range(3, 3 + len(order)), strict=True))
    wanted = [1 if none else ids.get(key, 2) for key, none in zip(keys.tolist(), missing.tolist(), strict=True)]
    shards = [rows.with_ids(number, table).column(f"{IDS}x").to_numpy() for number, table in enumerate(tables)]
    assert np.concatenate(shards).tolist() == wanted
