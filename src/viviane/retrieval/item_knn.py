"""Item neighbours: items that co-occur with the items of a history, weighted by recency."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from viviane.config.base import Settings
from viviane.retrieval.candidates import Candidates, best_of_scores, check_catalogue
from viviane.retrieval.histories import Histories, Ids, asked_items
from viviane.schema import RESERVED

_MOST_SCORES = 1 << 22  # maximum scores per batch
_MOST_DENSE = 1 << 24  # maximum pairs that are counted in a dense array
_GAPS = 16
_USERS = 1024  # users per block
_MOST_WAITING = 1 << 22  # maximum pairs buffered before they are summed


class ItemKNNSettings(Settings):
    """Settings of the neighbourhood.

    Args:
        max_gap: pairs with up to this distance in a history count; None counts all pairs.
        gap_decay: weight factor of a pair per position between its items.
        backward: weight of the earlier item as a neighbour of the later one; 1 for histories without an order.
        popularity_power: a pair's weight is divided by (product of the items' events + 1) to this power; 0.5 is the
            cosine.
        age_decay: weight factor of a history's item per newer item; 1 for histories without an order.
        max_history: number of newest items of a history that are used.
        num_neighbours: number of strongest neighbours per item; None: all.
    """

    max_gap: int | None = Field(default=10, ge=1)
    gap_decay: float = Field(default=0.8, gt=0, le=1)
    backward: float = Field(default=0.5, ge=0, le=1)
    popularity_power: float = Field(default=0.3, ge=0, le=1)
    age_decay: float = Field(default=0.7, gt=0, le=1)
    max_history: int = Field(default=20, ge=1)
    num_neighbours: int | None = Field(default=None, ge=1)


def _count_pairs(users: Histories, num_items: int, settings: ItemKNNSettings) -> tuple[Ids, NDArray[np.float64]]:
    """Return the pairs i * num_items + j, ascending, with w_ij + backward w_ji."""
    orderless = settings.max_gap is None and settings.gap_decay == 1 and settings.backward == 1
    if orderless and num_items**2 <= _MOST_DENSE:
        return _count_together(users, num_items)
    pairs = _PairSums(num_items)
    longest = int(users.lengths.max(initial=0)) - 1
    for gap in range(1, min(longest, settings.max_gap or longest) + 1):
        if gap % _GAPS == 1:  # short histories have no such pairs
            users = users.take(np.flatnonzero(users.lengths > gap))
            row, flat = users.row_of, users.values
        same = row[gap:] == row[:-gap]
        old, new = flat[:-gap][same], flat[gap:][same]
        decay = settings.gap_decay ** (gap - 1)
        pairs.add(old * num_items + new, decay)
        pairs.add(new * num_items + old, decay * settings.backward)
    return pairs.sums()


def _count_together(users: Histories, num_items: int) -> tuple[Ids, NDArray[np.float64]]:
    """Count all pairs of all histories equally: the product of the user-item matrix with its transpose."""
    total = torch.zeros(num_items, num_items)
    for first in range(0, len(users), _USERS):
        some = users.take(slice(first, first + _USERS))
        counts = np.bincount(some.row_of * num_items + some.values, minlength=len(some) * num_items)
        events = torch.from_numpy(counts.reshape(len(some), num_items)).float()
        total.addmm_(events.T, events)
    total.fill_diagonal_(0.0)
    flat = total.double().flatten().numpy()
    keys = np.flatnonzero(flat)
    return keys, flat[keys]


class _PairSums:
    """Sums weights by pair, so that memory is proportional to distinct pairs."""

    def __init__(self, num_items: int) -> None:
        size = num_items * num_items
        self._dense = np.zeros(size) if size <= _MOST_DENSE else None
        self._keys: Ids = np.empty(0, dtype=np.int64)
        self._sums: NDArray[np.float64] = np.empty(0, dtype=np.float64)
        self._waiting: list[tuple[Ids, float]] = []
        self._count = 0

    def add(self, keys: Ids, weight: float) -> None:
        self._waiting.append((keys, weight))
        self._count += len(keys)
        if self._count > _MOST_WAITING:
            self._flush()

    def sums(self) -> tuple[Ids, NDArray[np.float64]]:
        """Return the pairs, ascending, and the sums of their weights."""
        self._flush()
        if self._dense is None:
            return self._keys, self._sums
        keys = np.flatnonzero(self._dense)
        return keys, self._dense[keys]

    def _flush(self) -> None:
        if not self._waiting:
            return
        keys = np.concatenate([one for one, _ in self._waiting])
        weights = np.concatenate([np.full(len(one), weight) for one, weight in self._waiting])
        self._waiting, self._count = [], 0
        if self._dense is not None:
            self._dense += np.bincount(keys, weights, minlength=len(self._dense)).astype(np.float64)
            return
        self._keys, at = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        both = np.concatenate([self._sums, weights])
        self._sums = np.bincount(at, both, minlength=len(self._keys)).astype(np.float64)


class ItemKNN:
    """Scores items by their similarity to a history.

        w_ij     = sum over pairs of a history, i before j, of gap_decay^(positions between)    (and backward times
        w_ji) n_ij     = (w_ij + backward w_ji) / (events_i events_j + 1)^popularity_power
        score_j  = sum over items i of the history of age_decay^(newer items) n_ij

    The neighbours of item i are `item[start[i] : start[i + 1]]`, with their weights. It needs no training and is
    difficult to beat on sparse data (Dacrema, Cremonesi and Jannach 2019, "Are We Really Making Much Progress?").

    Args:
        start, item, weight: (N + 1,), (pairs,), (pairs,).
        settings: settings of the neighbourhood.

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
    def count(cls, users: Any, num_items: int, settings: ItemKNNSettings | None = None) -> ItemKNN:
        """Count pairs; ids that are reserved or outside the catalogue have no neighbours.

        Args:
            users: in a form of `Histories.of`.

        Raises:
            ConfigError: the catalogue is empty.
            SchemaError: a history is not a list of integer ids.
        """
        users = Histories.of(users)
        check_catalogue(num_items)
        chosen = settings or ItemKNNSettings()
        users = users.where((users.values >= RESERVED.first) & (users.values < num_items))
        events = np.bincount(users.values, minlength=num_items).astype(np.float64)
        keys, weights = _count_pairs(users, num_items, chosen)
        first, second = np.divmod(keys, num_items)
        weights = weights * (events[first] * events[second] + 1.0) ** -chosen.popularity_power
        kept = (first != second) & (weights > 0)
        first, second, weights = first[kept], second[kept], weights[kept]
        if chosen.num_neighbours is not None:
            order = np.lexsort((first, -weights, second))
            place = np.arange(len(order)) - np.searchsorted(second[order], second[order])
            strong = np.sort(order[place < chosen.num_neighbours])
            first, second, weights = first[strong], second[strong], weights[strong]
        start = np.searchsorted(first, np.arange(num_items + 1)).astype(np.int64)
        return cls(start, second, weights.astype(np.float32), chosen)

    def scores(self, histories: Any) -> NDArray[np.float32]:
        """Return (B, N), 0 for items that are not neighbours."""
        histories = Histories.of(histories)
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

    def candidates(self, histories: Any, k: int, rows: Any = None) -> Candidates:
        """Return the best k neighbours for each row, without those of its history, in a form of `Histories.of`."""
        histories = Histories.of(histories)
        step = max(1, _MOST_SCORES // self.num_items)
        parts = []
        for begin in range(0, len(histories), step):
            some = histories.take(slice(begin, begin + step))
            scores = torch.from_numpy(self.scores(some))
            parts.append(best_of_scores(scores.masked_fill_(scores == 0, -torch.inf), k, some))
        if not parts:
            return Candidates(np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32))
        return Candidates(np.concatenate([p.items for p in parts]), np.concatenate([p.scores for p in parts]))

    def score(self, histories: Any, items: Any, rows: Any = None) -> NDArray[np.float32]:
        """Return the scores of given items, (B, K)."""
        histories, items = asked_items(histories, items)
        step, found = max(1, _MOST_SCORES // self.num_items), np.zeros(items.shape, dtype=np.float32)
        for begin in range(0, len(histories), step):
            some = slice(begin, begin + step)
            asked = items[some]
            known = (asked >= 0) & (asked < self.num_items)
            scores = np.take_along_axis(self.scores(histories.take(some)), np.where(known, asked, 0), 1)
            found[some] = np.where(known, scores, 0.0)
        return found
