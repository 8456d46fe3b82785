"""A small data set with every kind of column, and its rows as plain Python: the truth to compare batches with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from viviane.batch import Batch
from viviane.data import Dataset, write_dataset
from viviane.schema import Schema

SCHEMA = Schema.from_dict(
    {
        "labels": [{"name": "click"}, {"name": "price", "task": "regression"}],
        "dense": [{"name": "row"}, {"name": "vector", "dim": 3}],
        "categorical": [
            {"name": "a", "num_ids": 1000},
            {"name": "tags", "num_ids": 50, "kind": "multi_hot", "weights": "tag_weights"},
            {"name": "b", "num_ids": 10, "dtype": "int64"},
            {"name": "history", "num_ids": 50, "kind": "sequence", "max_length": 6, "dtype": "int64"},
        ],
        "sample_weight": "importance",
    }
)


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows; column `row` numbers them."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        tags = random.integers(0, 50, random.integers(0, 4)).tolist()
        rows.append(
            {
                "click": float(random.integers(0, 2)),
                "price": float(np.float32(random.normal())),
                "row": float(number),
                "vector": random.integers(0, 9, 3).astype(float).tolist(),
                "a": int(random.integers(0, 1000)),
                "tags": tags,
                "tag_weights": [0.5 * tag for tag in tags],
                "b": int(random.integers(0, 10)),
                "history": random.integers(0, 50, random.integers(0, 7)).tolist(),
                "importance": float(number % 3),
            }
        )
    return rows


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in SCHEMA.column_names}


def write_rows(path: Path, rows: list[dict[str, Any]], rows_per_group: int = 7, rows_per_file: int = 21) -> Dataset:
    return write_dataset(
        path, SCHEMA, [columns_of(rows)], rows_per_group=rows_per_group, rows_per_file=rows_per_file, overwrite=True
    )


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """Undo the stacking, one row at a time."""
    found = []
    tags, history = batch.bags["tags"], batch.bags["history"]
    for r in range(batch.size):
        at = slice(int(tags.offsets[r]), int(tags.offsets[r + 1]))
        then = slice(int(history.offsets[r]), int(history.offsets[r + 1]))
        assert tags.weights is not None
        assert batch.weight is not None
        found.append(
            {
                "click": batch.labels[r, 0].item(),
                "price": batch.labels[r, 1].item(),
                "row": batch.dense[r, 0].item(),
                "vector": batch.dense[r, 1:4].tolist(),
                "a": batch.one_hot[r, 0].item(),
                "tags": tags.values[at].tolist(),
                "tag_weights": tags.weights[at].tolist(),
                "b": batch.one_hot[r, 1].item(),
                "history": history.values[then].tolist(),
                "importance": batch.weight[r].item(),
            }
        )
    return found


def same_bits(a: Batch, b: Batch) -> bool:
    """Say whether two batches are equal, bit by bit, dtypes included."""

    def parts(batch: Batch) -> list[Any]:
        tensors = [batch.labels, batch.dense, batch.one_hot, batch.weight]
        for name in sorted(batch.bags):
            bag = batch.bags[name]
            tensors += [bag.values, bag.offsets, bag.weights]
        return [None if t is None else (t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in tensors]

    return parts(a) == parts(b)
