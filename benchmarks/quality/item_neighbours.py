"""Beauty as sequences, and what the items of a history say about others by having been bought together."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from raw_data import DATA

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

# Chosen on the validation part among a dozen.
_GAP_DECAY = 0.8  # weight of two items of a user, for each item between them
_BACKWARD = 0.5  # weight of the earlier item as the later one's neighbour
_POPULARITY_POWER = 0.3
_AGE_DECAY = 0.7  # weight of a history's item, for each newer one
_MAX_GAP = 10
_MAX_HISTORY = 20


def read_users() -> list[Ids]:
    """Return each user's items in the order of time, numbered from 1."""
    with gzip.open(DATA / "amazon_seq" / "Beauty.txt.gz", "rt") as file:
        return [np.array(line.split()[1:], dtype=np.int64) for line in file]


def read_attributes(num_items: int) -> NDArray[np.bool_]:
    """Return which attributes, of category and brand, an item has: (items + 1, attributes)."""
    with gzip.open(DATA / "amazon_seq" / "Beauty_item2attributes.json.gz", "rt") as file:
        known: dict[str, list[int]] = json.load(file)
    found = np.zeros((num_items + 1, 1 + max(max(ids, default=0) for ids in known.values())), dtype=bool)
    for item, ids in known.items():
        found[int(item), ids] = True
    return found


@dataclass(frozen=True)
class Neighbours:
    """Items bought by the same users, row by row: those of item i are `item[start[i] : start[i + 1]]`.

    Args:
        popularity: events of each item.
    """

    start: Ids
    item: Ids
    weight: Floats
    popularity: Floats

    @classmethod
    def count(cls, sequences: Sequence[Ids], num_items: int) -> Neighbours:
        """Count pairs in sequences that hold training events alone."""
        size = num_items + 1
        popularity = np.bincount(np.concatenate(sequences), minlength=size).astype(np.float32)
        keys, weights = [], []
        flat, user = np.concatenate(sequences), np.repeat(np.arange(len(sequences)), [len(one) for one in sequences])
        for gap in range(1, _MAX_GAP + 1):
            same = user[gap:] == user[:-gap]
            old, new = flat[:-gap][same], flat[gap:][same]
            keys += [old * size + new, new * size + old]
            weights += [np.full(len(old), _GAP_DECAY ** (gap - 1) * side) for side in (1.0, _BACKWARD)]
        pair, at = np.unique(np.concatenate(keys), return_inverse=True)
        weight = np.bincount(at, np.concatenate(weights))
        first, second = pair // size, pair % size
        weight *= (popularity[first] * popularity[second] + 1.0) ** -_POPULARITY_POWER
        return cls(np.searchsorted(first, np.arange(size + 1)), second, weight.astype(np.float32), popularity)

    def of(self, item: int) -> tuple[Ids, Floats]:
        """Return an item's neighbours and their weights."""
        part = slice(self.start[item], self.start[item + 1])
        return self.item[part], self.weight[part]

    def scores(self, history: Ids) -> Floats:
        """Return a score of every item, newer items of the history counting more; its own items have -1."""
        newest = history[::-1][:_MAX_HISTORY]
        found = [self.of(item) for item in newest]
        weights = np.concatenate([weight * _AGE_DECAY**age for age, (_, weight) in enumerate(found)])
        scores = np.bincount(np.concatenate([item for item, _ in found]), weights, minlength=len(self.popularity))
        scores[0] = scores[history] = -1.0
        return scores.astype(np.float32)


def rank_of(scores: Floats, item: int) -> float:
    """Return the item's rank, 0 the best; equal scores count half. Items with -1 are out."""
    return float((scores > scores[item]).sum() + ((scores == scores[item]).sum() - 1) / 2)
