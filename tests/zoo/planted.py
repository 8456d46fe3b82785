"""Small data sets in which only what a model is about decides the label."""

import numpy as np

from viviane.data import Dataset, write_dataset
from viviane.schema import Schema

ITEMS = 40
LENGTH = 8


def history_schema(**item) -> Schema:
    """A user, a history of items and a target item."""
    return Schema(
        labels=[{"name": "click"}],
        dense=[{"name": "hour"}],
        categorical=[
            {"name": "user", "num_ids": 12},
            {"name": "hist", "num_ids": ITEMS + 3, "kind": "sequence", "max_length": LENGTH, "vocabulary": "item"},
            {"name": "item", "num_ids": ITEMS + 3, **item},
        ],
    )


def history_rows(count: int, seed: int) -> dict:
    """Half of the targets stand in the history, and those are clicked with 95 %, the others with 5 %."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, count)
    hist = [rng.choice(ITEMS, length, replace=False) + 3 for length in lengths]
    item, known = rng.integers(3, ITEMS + 3, count), rng.random(count) < 0.5
    item = np.where(known, [rng.choice(one) for one in hist], item)
    inside = np.array([one in bag for one, bag in zip(item, hist, strict=True)])
    return {
        "click": (rng.random(count) < np.where(inside, 0.95, 0.05)).astype("float32"),
        "hour": rng.normal(size=count).astype("float32"),
        "user": rng.integers(3, 12, count).astype("int32"),
        "hist": [one.astype("int32") for one in hist],
        "item": item.astype("int32"),
    }


def pair_schema(labels=("click",), **more) -> Schema:
    """A user, an item and one label or more."""
    columns = [{"name": "user", "num_ids": 63}, {"name": "item", "num_ids": 43}]
    return Schema(labels=[{"name": name} for name in labels], categorical=columns, **more)


def pair_rows(count: int, seed: int) -> dict:
    """A user likes the items of his class, of four; "buy" asks besides for an even class."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(3, 63, count), rng.integers(3, 43, count)
    match = user % 4 == item % 4
    click = rng.random(count) < np.where(match, 0.9, 0.1)
    buy = rng.random(count) < np.where(match & (user % 2 == 0), 0.9, 0.1)
    return {
        "click": click.astype("float32"),
        "buy": buy.astype("float32"),
        "user": user.astype("int32"),
        "item": item.astype("int32"),
    }


def written(folder, schema: Schema, make, count: int) -> tuple[Dataset, Dataset]:
    """Write and open `count` rows to train on and a quarter as many to test with."""
    columns = set(schema.column_names)
    parts = []
    for name, rows, seed in (("train", count, 0), ("test", count // 4, 1)):
        made = {key: value for key, value in make(rows, seed).items() if key in columns}
        parts.append(write_dataset(folder / name, schema, [made]))
    return parts[0], parts[1]
