"""MovieLens 1M for ranking: every rating an event, one event of each user tests, another validates.

The published form tests each user's newest event; this copy has no times, so a hash of the user chooses. The test item
is ranked against 99 films that the user never rated (the protocol of He et al. 2017), or against all that are not
among his training films.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from raw_data import DATA, crc

Ids = NDArray[np.int64]
NUM_NEGATIVES = 99
FIRST_ID = 3  # the ids below are reserved
_NEIGHBOURS = 50  # the best of 20, 50, 100 and 200 on the validation part


@dataclass(frozen=True)
class LeaveOneOut:
    """Users and items are numbered from 0.

    Args:
        user, item: the training events.
        seen: (users, items), true where an event trains.
        held: "valid" and "test", an item for each user.
        negatives: "valid" and "test", (users, 99).
    """

    user: Ids
    item: Ids
    seen: NDArray[np.bool_]
    held: dict[str, Ids]
    negatives: dict[str, Ids]

    def sampled_rows(self, part: str) -> tuple[Ids, Ids]:
        """Return users and items (users, 100) to score, the held-out item first."""
        items = np.concatenate([self.held[part][:, None], self.negatives[part]], 1)
        return np.repeat(np.arange(len(items)), items.shape[1]).reshape(items.shape), items

    def rank_in_catalogue(self, scores: NDArray[np.floating], part: str) -> NDArray[np.float64]:
        """Return the rank of each user's held-out item, 0 the best, the other films that he has seen removed.

        Args:
            scores: (users, items).
        """
        own = np.take_along_axis(scores, self.held[part][:, None], 1)
        out = self.seen.copy()
        if part == "test":  # a user's validation film is known by then
            np.put_along_axis(out, self.held["valid"][:, None], True, 1)
        better = ((scores > own) & ~out).sum(1)
        return better + (((scores == own) & ~out).sum(1) - 1) / 2  # equal scores count half


def load() -> LeaveOneOut:
    """Read the ratings and hold two events of each user out."""
    ratings = pd.read_parquet(DATA / "ml1m" / "ratings_notime.parquet")
    user_of, item_of = (np.unique(ratings[name], return_inverse=True) for name in ("user_id", "movie_id"))
    user, item = user_of[1].astype(np.int64), item_of[1].astype(np.int64)
    num_users, num_items = len(user_of[0]), len(item_of[0])
    rated = np.zeros((num_users, num_items), dtype=bool)
    rated[user, item] = True
    order = np.argsort(user, kind="stable")
    films = np.split(item[order], np.flatnonzero(np.diff(user[order])) + 1)
    held: dict[str, Ids] = {part: np.empty(num_users, dtype=np.int64) for part in ("valid", "test")}
    negatives: dict[str, Ids] = {part: np.empty((num_users, NUM_NEGATIVES), dtype=np.int64) for part in held}
    seen = rated.copy()
    for row, (name, own) in enumerate(zip(user_of[0], films, strict=True)):
        left = own
        for part in ("test", "valid"):
            at = crc(f"{name}:{part}") % len(left)
            held[part][row] = left[at]
            left = np.delete(left, at)
            negatives[part][row] = _others(f"{name}:{part}", rated[row])
        seen[row, [held["test"][row], held["valid"][row]]] = False
    trains = seen[user, item]
    return LeaveOneOut(user[trains], item[trains], seen, held, negatives)


def _others(seed: str, rated: NDArray[np.bool_]) -> list[int]:
    """Return 99 films that the user never rated, by a hash."""
    found: dict[int, None] = {}
    t = 0
    while len(found) < NUM_NEGATIVES:
        film = crc(f"{seed}:{t}") % len(rated)
        if not rated[film]:
            found[film] = None
        t += 1
    return list(found)


def hit_rate(ranks: NDArray[np.float64], k: int) -> float:
    """Return the share of users whose item is among the first k; it is recall@k too, of one item."""
    return float((ranks < k).mean())


def ndcg(ranks: NDArray[np.float64], k: int) -> float:
    """Return the mean of 1 / log2(rank + 2) over users, 0 beyond k."""
    return float(np.where(ranks < k, 1 / np.log2(ranks + 2), 0.0).mean())


def sampled_ranks(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the rank of the first column of (users, 100)."""
    return (scores[:, 1:] > scores[:, :1]).sum(1) + (scores[:, 1:] == scores[:, :1]).sum(1) / 2


def neighbours(data: LeaveOneOut) -> NDArray[np.float32]:
    """Return what item-kNN scores: (users, items), the cosines of an item and the user's films summed up."""
    seen = data.seen.astype(np.float32)
    together = seen.T @ seen
    norm = np.sqrt(np.diag(together)).clip(1)
    cosine = together / norm / norm[:, None]
    np.fill_diagonal(cosine, 0)
    nearest = np.partition(cosine, -_NEIGHBOURS, axis=1)[:, -_NEIGHBOURS:][:, :1]
    return np.asarray(seen @ np.where(cosine >= nearest, cosine, 0).T, dtype=np.float32)
