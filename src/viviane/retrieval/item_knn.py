"""Item neighbours: what was taken together with the items of a history, the newer ones counting more."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.retrieval.candidates import Candidates, best_of_scores
from viviane.retrieval.histories import Histories, Ids
from viviane.schema import RESERVED

_MOST_SCORES = 1 << 22  # of one batch


class ItemKNNSettings(Settings):
    """How neighbours are counted.

    Args:
        max_gap: pairs with up to so many places between them in a history count; None counts all pairs.
        gap_decay: weight of a pair, for each place between its items.
        backward: weight of the earlier item as a neighbour of the later one; 1 for histories without an order.
        popularity_power: a pair's weight is divided by (events of both, multiplied, + 1) to this power; 0.5 is the
            cosine.
        age_decay: weight of a history's item, for each newer one; 1 for histories without an order.
        max_history: newest items of a history that are asked with.
        num_neighbours: strongest neighbours of an item that are kept; None keeps all.
    """

    max_gap: int | None = Field(default=10, ge=1)
    gap_decay: float = Field(default=0.8, gt=0, le=1)
    backward: float = Field(default=0.5, ge=0, le=1)
    popularity_power: float = Field(default=0.3, ge=0, le=1)
    age_decay: float = Field(default=0.7, gt=0, le=1)
    max_history: int = Field(default=20, ge=1)
    num_neighbours: int | None = Field(default=None, ge=1)


class ItemKNN:
    """Scores items by their neighbourhood to a history.

        w_ij     = sum over pairs of a history, i before j, of gap_decay^(places between)    (and backward times w_ji)
        n_ij     = (w_ij + backward w_ji) / (events_i events_j + 1)^popularity_power
        score_j  = sum over items i of the history of age_decay^(newer items) n_ij

    The neighbours of item i are `item[start[i] : start[i + 1]]`, with their weights. It needs no training and is hard
    to beat on sparse data (Dacrema, Cremonesi and Jannach 2019, "Are We Really Making Much Progress?").

    Args:
        start, item, weight: (N + 1,), (pairs,), (pairs,).
        settings: how to ask.

    Example:
        >>> knn = ItemKNN.count(Histories.of([[3, 4], [3, 4], [4, 5]]), num_items=6)
        >>> knn.candidates(Histories.of([[3]]), 2).items.tolist()
        [[4, -1]]
    """

    name = "item_knn"

    def __init__(
        self, start: Ids, item: Ids, weight: NDArray[np.float32], settings: ItemKNNSettings | None = None
    ) -> None:
        self.start, self.item, self.weight = start, item, weight
        self.settings = settings or ItemKNNSettings()
        self.num_items = len(start) - 1

    @classmethod
    def count(cls, users: Histories, num_items: int, settings: ItemKNNSettings | None = None) -> ItemKNN:
        """Count pairs; ids that are reserved or not in the catalogue have no neighbours.

        Raises:
            ConfigError: the catalogue is empty.
        """
        if num_items <= RESERVED.first:
            raise ConfigError("the catalogue has no items", value=num_items, allowed=f"more than {RESERVED.first} ids")
        chosen = settings or ItemKNNSettings()
        users = users.where((users.values >= RESERVED.first) & (users.values < num_items))
        events = np.bincount(users.values, minlength=num_items).astype(np.float64)
        row, flat = users.row_of, users.values
        keys, weights = np.empty(0, dtype=np.int64), np.empty(0)
        longest = int(users.lengths.max(initial=0)) - 1
        for gap in range(1, min(longest, chosen.max_gap or longest) + 1):
            same = row[gap:] == row[:-gap]
            old, new = flat[:-gap][same], flat[gap:][same]
            both = np.concatenate([keys, old * num_items + new, new * num_items + old])
            decay = chosen.gap_decay ** (gap - 1)
            sides = [np.full(len(old), decay), np.full(len(old), decay * chosen.backward)]
            # Joined after each gap: memory holds distinct pairs, not all of them.
            keys, at = np.unique(both, return_inverse=True)
            weights = np.bincount(at, np.concatenate([weights, *sides]), minlength=len(keys))
        first, second = np.divmod(keys, num_items)
        weights = weights * (events[first] * events[second] + 1.0) ** -chosen.popularity_power
        kept = (first != second) & (weights > 0)
        first, second, weights = first[kept], second[kept], weights[kept]
        if chosen.num_neighbours is not None:
            order = np.lexsort((second, -weights, first))
            place = np.arange(len(order)) - np.searchsorted(first[order], first[order])
            strong = np.sort(order[place < chosen.num_neighbours])
            first, second, weights = first[strong], second[strong], weights[strong]
        start = np.searchsorted(first, np.arange(num_items + 1)).astype(np.int64)
        return cls(start, second, weights.astype(np.float32), chosen)

    def scores(self, histories: Histories) -> NDArray[np.float32]:
        """Return (B, N), 0 for items that are no neighbours."""
        asked = histories.where((histories.values >= RESERVED.first) & (histories.values < self.num_items))
        asked = asked.newest(self.settings.max_history)
        first = self.start[asked.values]
        counts = self.start[asked.values + 1] - first
        ends = counts.cumsum()
        at = np.repeat(first - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
        share = (self.settings.age_decay ** asked.age.astype(np.float64)).repeat(counts)
        keys = asked.row_of.repeat(counts) * self.num_items + self.item[at]
        size = len(histories) * self.num_items
        total = np.bincount(keys, self.weight[at] * share, minlength=size)
        return total.reshape(len(histories), self.num_items).astype(np.float32)

    def candidates(self, histories: Histories, k: int, rows: Any = None) -> Candidates:
        """Return the best k neighbours for each row, those of its history taken out."""
        step = max(1, _MOST_SCORES // self.num_items)
        parts = []
        for begin in range(0, len(histories), step):
            some = histories.take(slice(begin, begin + step))
            scores = torch.from_numpy(self.scores(some))
            parts.append(best_of_scores(scores.masked_fill_(scores == 0, -torch.inf), k, some))
        if not parts:
            return Candidates(np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32))
        return Candidates(np.concatenate([p.items for p in parts]), np.concatenate([p.scores for p in parts]))
