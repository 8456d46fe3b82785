"""Two stages on Beauty: a two-tower model and item neighbours choose candidates, a DIN ranks them.

The last item of a user tests, the one before validates. For the validation and test items both stages know the events
before these two alone; only the history that is asked with holds the validation item when the test item is ranked. The
ranker learns from the third last item, with candidates that were found without it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from item_neighbours import Floats, Ids, Neighbours, rank_of, read_attributes
from numpy.typing import NDArray

import viviane as vv
from viviane.schema import Schema

HISTORY = 10
FROM_NEIGHBOURS, FROM_TOWERS = 50, 25  # a user; the ranker's time grows with them
NEGATIVES = 20  # of a user's candidates, for the ranker to learn from
FIRST_ID = 3  # the ids below are reserved
_ONE = ("last", "item")
FEATURES = (
    "neighbour_score", "last_score", "tower_score", "popularity", "neighbour_rank", "tower_rank", "shared_last",
    "shared_all", "length",
)  # fmt: skip

TOWERS: dict[str, Any] = {
    "dim": 64, "user_mlp": [64], "item_mlp": [64], "out_dim": 64, "temperature": 0.1, "embedding_dropout": 0.2,
    "init": {"type": "normal", "std": 0.1},
}  # fmt: skip
RANKER: dict[str, Any] = {
    "dim": 16, "attention_mlp": [16], "top_mlp": [64, 32], "activation": "relu", "dropout": 0.2,
    "embedding_dropout": 0.2, "init": {"type": "normal", "std": 0.03},
}  # fmt: skip


@dataclass
class Candidates:
    """Rows (user, item) side by side, those of a user together.

    Args:
        user, item: the rows.
        dense: (rows, features).
    """

    user: Ids
    item: Ids
    dense: Floats


def _items(kind: str, name: str, num_items: int) -> dict[str, Any]:
    more = {"kind": kind, "max_length": HISTORY} if kind != "one_hot" else {}
    return {"name": name, "num_ids": num_items + 1 + FIRST_ID, "vocabulary": "item", **more}


def _solver(epochs: int, seed: int, device: str, **more: Any) -> vv.Solver:
    return vv.Solver(
        batch_size=512, lr=0.001, epochs=epochs, device=device, seed=seed, drop_last=True, num_threads=1, **more
    )


def _bags(histories: list[Ids]) -> list[NDArray[np.int32]]:
    return [(one[-HISTORY:] + FIRST_ID).astype(np.int32) for one in histories]


class Retrieval:
    """Both ways to candidates, trained on each user's items before the last `held_out`."""

    def __init__(self, users: list[Ids], held_out: int, num_items: int, seed: int, device: str) -> None:
        sequences = [items[:-held_out] for items in users]
        self.num_items = num_items
        self.neighbours = Neighbours.count(sequences, num_items)
        categorical = [_items("sequence", "history", num_items), *(_items("one_hot", n, num_items) for n in _ONE)]
        schema = Schema(labels=[{"name": "bought"}], categorical=categorical)
        solver = _solver(8, seed, device)
        self.model = vv.Model(solver, schema)
        self.model.add(vv.zoo.TwoTower(user=["history", "last"], item=["item"], combiner="mean", **TOWERS))
        self.model.compile(vv.Adam(), vv.Adam(lr=0.003, weight_decay=1e-6), metrics=["log_loss"])
        pairs = [(one[:at], one[at]) for one in sequences for at in range(1, len(one))]
        order = np.random.default_rng(seed).permutation(len(pairs))
        rows = self._rows([pairs[i][0] for i in order])
        item = np.array([pairs[i][1] for i in order]) + FIRST_ID
        rows |= {"item": item.astype(np.int32), "bought": np.ones(len(order), dtype=np.float32)}
        with tempfile.TemporaryDirectory() as folder:
            self.model.fit(vv.write_dataset(Path(folder) / "train", schema, [rows]))
        every = (np.arange(num_items + 1) + FIRST_ID).astype(np.int32)
        self.items = self.model.tensor("item_vector", {"item": every})

    def _rows(self, histories: list[Ids]) -> dict[str, Any]:
        last = np.array([one[-1] for one in histories]) + FIRST_ID
        return {"history": _bags(histories), "last": last.astype(np.int32)}

    def tower_scores(self, histories: list[Ids]) -> Floats:
        """Return (users, items + 1), -2 for the items of the history."""
        scores = self.model.tensor("user_vector", self._rows(histories)) @ self.items.T
        scores[:, 0] = -2.0
        for row, history in zip(scores, histories, strict=True):
            row[history] = -2.0
        return np.asarray(scores, dtype=np.float32)

    def candidates(self, histories: list[Ids], attributes: NDArray[np.bool_]) -> Candidates:
        """Return each user's candidates with the ranker's features, without looking at what he bought next."""
        towers = self.tower_scores(histories)
        parts = []
        for history, tower in zip(histories, towers, strict=True):
            near = self.neighbours.scores(history)
            best = np.argpartition(-near, FROM_NEIGHBOURS)[:FROM_NEIGHBOURS]
            chosen = np.union1d(best[near[best] > 0], np.argpartition(-tower, FROM_TOWERS)[:FROM_TOWERS])
            parts.append((chosen, self._features(history, chosen, near, tower, attributes)))
        user = np.repeat(np.arange(len(parts)), [len(items) for items, _ in parts])
        return Candidates(user, np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts]))

    def _features(
        self, history: Ids, chosen: Ids, near: Floats, tower: Floats, attributes: NDArray[np.bool_]
    ) -> Floats:
        last = np.zeros(self.num_items + 1, dtype=np.float32)
        item, weight = self.neighbours.of(history[-1])
        last[item] = weight
        shared = (attributes[chosen].astype(np.float32) @ attributes[history[-HISTORY:]].T.astype(np.float32)).clip(
            0, 5
        )
        near, tower = near[chosen], tower[chosen]
        columns = (
            np.log(near.clip(0) + 0.01), np.log(last[chosen] + 0.01), 5 * tower,
            np.log1p(self.neighbours.popularity[chosen]), np.log1p((-near).argsort().argsort()),
            np.log1p((-tower).argsort().argsort()), shared[:, -1], shared.mean(1),
            np.full(len(chosen), np.log(len(history))),
        )  # fmt: skip
        return np.stack(columns, 1).astype(np.float32)


class Ranker:
    """A DIN over history, candidate and features, trained on the candidates of one item for each user."""

    def __init__(
        self, rows: Candidates, histories: list[Ids], bought: Ids, num_items: int, seed: int, device: str
    ) -> None:
        hit = rows.item == bought[rows.user]
        found = np.zeros(len(bought), dtype=bool)
        found[rows.user[hit]] = True
        rng = np.random.default_rng(seed)
        share = NEGATIVES / np.bincount(rows.user, minlength=len(bought)).clip(1)
        kept = np.flatnonzero(found[rows.user] & (hit | (rng.random(len(hit)) < share[rows.user])))
        kept = rng.permutation(kept)
        self.mean, self.std = rows.dense[kept].mean(0), rows.dense[kept].std(0) + 1e-6
        schema = Schema(
            labels=[{"name": "bought"}],
            dense=[{"name": name} for name in FEATURES],
            categorical=[_items("sequence", "history", num_items), _items("one_hot", "item", num_items)],
        )
        solver = _solver(3, seed, device, ema_decay=0.995)
        self.model = vv.Model(solver, schema)
        self.model.add(vv.zoo.DIN(history="history", target="item", **RANKER))
        self.model.compile(vv.Adam(), vv.Adam(lr=0.001, weight_decay=1e-5), metrics=["auc"])
        data = self._rows(rows, kept, histories) | {"bought": hit[kept].astype(np.float32)}
        with tempfile.TemporaryDirectory() as folder:
            self.model.fit(vv.write_dataset(Path(folder) / "train", schema, [data]))

    def _rows(self, rows: Candidates, kept: Ids, histories: list[Ids]) -> dict[str, Any]:
        bags = _bags(histories)
        dense = (rows.dense[kept] - self.mean) / self.std
        return {
            "history": [bags[user] for user in rows.user[kept]],
            "item": (rows.item[kept] + FIRST_ID).astype(np.int32),
            **{name: dense[:, i] for i, name in enumerate(FEATURES)},
        }

    def scores(self, rows: Candidates, histories: list[Ids]) -> Floats:
        """Return a score of each row."""
        step = 100_000
        parts = [np.arange(first, min(first + step, len(rows.user))) for first in range(0, len(rows.user), step)]
        return np.concatenate([self.model.predict(self._rows(rows, part, histories))[:, 0] for part in parts])


def ranks(rows: Candidates, scores: Floats, bought: Ids) -> NDArray[np.float64]:
    """Return the rank of what each user bought among his candidates; infinite where it is none of them."""
    hit = rows.item == bought[rows.user]
    own = np.full(len(bought), np.inf)
    own[rows.user[hit]] = scores[hit]
    better, equal = scores > own[rows.user], scores == own[rows.user]
    found = np.bincount(rows.user, better, len(bought)) + (np.bincount(rows.user, equal, len(bought)) - 1) / 2
    return np.where(np.isinf(own), np.inf, found)


def neighbour_ranks(retrieval: Retrieval, histories: list[Ids], bought: Ids) -> NDArray[np.float64]:
    """Return the rank of what each user bought among all items, by item neighbours alone."""
    pairs = zip(histories, bought, strict=True)
    return np.array([rank_of(retrieval.neighbours.scores(history), item) for history, item in pairs])


def tower_ranks(retrieval: Retrieval, histories: list[Ids], bought: Ids) -> NDArray[np.float64]:
    """Return the same by the two towers alone."""
    scores = retrieval.tower_scores(histories)
    return (scores > np.take_along_axis(scores, bought[:, None], 1)).sum(1).astype(np.float64)


def evaluate(
    users: list[Ids], seed: int, device: str = "cpu", parts: tuple[str, ...] = ("test",)
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Train both stages, and return the ranks of "valid" or "test" by the two stages, the towers, the neighbours."""
    num_items = int(max(items.max() for items in users))
    attributes = read_attributes(num_items)
    early, late = (Retrieval(users, held_out, num_items, seed, device) for held_out in (3, 2))
    before = [items[:-3] for items in users]
    bought = np.array([items[-3] for items in users])
    ranker = Ranker(early.candidates(before, attributes), before, bought, num_items, seed, device)
    result = {}
    for part in parts:
        held_out = {"valid": 2, "test": 1}[part]
        histories, bought = [items[:-held_out] for items in users], np.array([items[-held_out] for items in users])
        rows = late.candidates(histories, attributes)
        result[part] = {
            "two stages": ranks(rows, ranker.scores(rows, histories), bought),
            "two towers alone": tower_ranks(late, histories, bought),
            "item neighbours alone": neighbour_ranks(late, histories, bought),
        }
    return result
