"""The most popular items: the baseline of a recommender, and the fallback for users without a history."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.retrieval.candidates import NO_ITEM, Candidates, check_catalogue, drop_seen
from viviane.retrieval.histories import Histories, asked_items
from viviane.schema import RESERVED


class Popularity:
    """Items by descending number of events, then ascending id.

    Args:
        counts: number of events of each item, (N,).

    Example:
        >>> popular = Popularity.count(Histories.of([[3, 4], [4, 5]]), num_items=6)
        >>> popular.candidates(Histories.of([[4], []]), 2).items.tolist()
        [[3, 5], [4, 3]]
    """

    name = "popularity"

    def __init__(self, counts: NDArray[np.floating]) -> None:
        self.counts = np.asarray(counts, dtype=np.float32)
        self.num_items = len(self.counts)
        items = np.arange(RESERVED.first, self.num_items)
        self._order = items[np.argsort(-self.counts[items], kind="stable")]

    @classmethod
    def count(cls, users: Any, num_items: int) -> Popularity:
        """Count the events; ids that are reserved or outside the catalogue are ignored.

        Args:
            users: in a form of `Histories.of`.

        Raises:
            ConfigError: the catalogue is empty.
            SchemaError: a history is not a list of integer ids.
        """
        users = Histories.of(users)
        check_catalogue(num_items)
        known = users.values[(users.values >= RESERVED.first) & (users.values < num_items)]
        return cls(np.bincount(known, minlength=num_items).astype(np.float32))

    def candidates(self, histories: Any, k: int, rows: Any = None) -> Candidates:
        """Return the best k items for each row, without those of its history, in a form of `Histories.of`."""
        histories = Histories.of(histories)
        longest = int(histories.lengths.max(initial=0))
        shown = self._order[: k + longest]
        items = np.broadcast_to(shown, (len(histories), len(shown)))
        scores = np.broadcast_to(self.counts[shown], items.shape)
        if not len(shown):
            items = np.full((len(histories), 1), NO_ITEM)
            scores = np.full(items.shape, -np.inf)
        return drop_seen(Candidates(items.astype(np.int64), scores.astype(np.float32)), histories).first(k)

    def score(self, histories: Any, items: Any, rows: Any = None) -> NDArray[np.float32]:
        """Return the number of events of given items, (B, K)."""
        _, items = asked_items(histories, items)
        known = (items >= 0) & (items < self.num_items)
        return np.where(known, self.counts[np.where(known, items, 0)], 0.0).astype(np.float32)
