"""NCF and two-tower on MovieLens 1M: ranking a held-out film of each user, see `leave_one_out`.

Trained for a number of epochs that the validation films chose; each epoch of NCF draws four new films that the user
has not rated in training for each of his films, as its paper does. The user's tower reads his other films: thirty drawn
again for each row, without the one that is to be found, and all of them in the end.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leave_one_out import FIRST_ID, Ids, LeaveOneOut, hit_rate, ndcg, sampled_ranks
from numpy.typing import NDArray

import viviane as vv
from viviane.batch import Bag, Batch, Layout
from viviane.schema import Schema

NEGATIVES = 4
NCF: dict[str, Any] = {
    "dim": 32, "mlp_layers": [64, 32, 16], "embedding_dropout": 0.1, "init": {"type": "normal", "std": 0.05},
}  # fmt: skip
NCF_EPOCHS, NCF_BATCH = 6, 4096
TOWERS: dict[str, Any] = {
    "dim": 64, "user_mlp": [64], "item_mlp": [64], "out_dim": 64, "temperature": 0.1, "combiner": "mean",
    "init": {"type": "normal", "std": 0.1},
}  # fmt: skip
TOWER_EPOCHS, TOWER_BATCH, HISTORY = 5, 512, 30


def _model(data: LeaveOneOut, recipe: Any, tables: vv.Adam, solver: vv.Solver) -> vv.Model:
    users, items = data.seen.shape
    columns = [{"name": "user", "num_ids": users + FIRST_ID}, {"name": "item", "num_ids": items + FIRST_ID}]
    model = vv.Model(solver, Schema(labels=[{"name": "rated"}], categorical=columns))
    model.add(recipe)
    model.compile(vv.Adam(), tables, metrics=["log_loss"])
    return model


def _epoch(model: vv.Model, user: Ids, item: Ids, rated: np.ndarray[Any, Any]) -> None:
    rows = _ids(user=user, item=item) | {"rated": rated.astype(np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        model.fit(vv.write_dataset(Path(folder) / "train", model.schema, [rows]))


def _ids(**columns: Ids) -> dict[str, Any]:
    return {name: (ids.ravel() + FIRST_ID).astype(np.int32) for name, ids in columns.items()}


def _solver(batch: int, lr: float, steps: int, seed: int, device: str) -> vv.Solver:
    return vv.Solver(
        batch_size=batch, lr=lr, warmup_steps=100, decay_start=1, decay_steps=steps, decay_power=1.0, seed=seed,
        device=device, drop_last=True, num_threads=1, eval_batch_size=65536,
    )  # fmt: skip


def train_ncf(data: LeaveOneOut, seed: int, device: str = "cpu", epochs: int = NCF_EPOCHS, **options: Any) -> vv.Model:
    """Train NeuMF on each rated film and four others."""
    rng, num_items = np.random.default_rng(seed), data.seen.shape[1]
    steps = epochs * (len(data.user) * (1 + NEGATIVES) // NCF_BATCH)
    recipe = vv.zoo.NCF(user="user", item="item", **NCF | options)
    tables = vv.Adam(lr=0.002, weight_decay=1e-6)
    model = _model(data, recipe, tables, _solver(NCF_BATCH, 0.001, steps, seed, device))
    for _ in range(epochs):
        others = rng.integers(0, num_items, (len(data.user), NEGATIVES))
        while (wrong := data.seen[data.user[:, None], others]).any():
            others[wrong] = rng.integers(0, num_items, int(wrong.sum()))
        item = np.concatenate([data.item[:, None], others], 1)
        order = rng.permutation(item.size)
        rated = np.arange(item.size) % (1 + NEGATIVES) == 0
        _epoch(model, np.repeat(data.user, 1 + NEGATIVES)[order], item.ravel()[order], rated[order])
    return model


class Towers:
    """Two towers on the rated films, the batch's other films as wrong answers."""

    def __init__(self, data: LeaveOneOut, seed: int, device: str = "cpu", epochs: int = TOWER_EPOCHS) -> None:
        self.data, self.rng = data, np.random.default_rng(seed)
        films = data.seen.shape[1]
        self.films = np.nonzero(data.seen)[1]  # those of user u are films[start[u] : start[u + 1]]
        self.start = np.concatenate([[0], data.seen.sum(1).cumsum()])
        columns = [
            {"name": "item", "num_ids": films + FIRST_ID},
            {"name": "history", "kind": "multi_hot", "num_ids": films + FIRST_ID},
        ]
        self.schema = Schema(labels=[{"name": "rated"}], categorical=columns)
        steps = len(data.user) // TOWER_BATCH
        self.model = vv.Model(_solver(TOWER_BATCH, 0.001, epochs * steps, seed, device), self.schema)
        self.model.add(vv.zoo.TwoTower(user=["history"], item=["item"], **TOWERS))
        self.model.compile(vv.Adam(), vv.Adam(lr=0.005, weight_decay=1e-5), metrics=["log_loss"])
        with self.model.trainer.switches():
            for _ in range(epochs):
                order = self.rng.permutation(len(data.user))[: steps * TOWER_BATCH]
                for rows in order.reshape(steps, TOWER_BATCH):
                    self.model.trainer.train_step(self._batch(rows).to(self.model.trainer.device))

    def _batch(self, rows: Ids) -> Batch:
        user, item = self.data.user[rows], self.data.item[rows]
        first, count = self.start[user, None], (self.start[user + 1] - self.start[user])[:, None]
        drawn = self.films[first + (self.rng.random((len(rows), HISTORY)) * count).astype(np.int64)]
        others = drawn != item[:, None]
        bag = Bag(
            torch.from_numpy((drawn[others] + FIRST_ID).astype(np.int32)),
            torch.from_numpy(np.concatenate([[0], others.sum(1).cumsum()])),
        )
        return Batch(
            Layout.of(self.schema), labels=torch.ones(len(rows), 1), dense=torch.empty(len(rows), 0),
            one_hot=torch.from_numpy((item[:, None] + FIRST_ID).astype(np.int32)), bags={"history": bag},
        )  # fmt: skip

    def scores(self) -> NDArray[np.float32]:
        """Return (users, items)."""
        histories = [(films + FIRST_ID).astype(np.int32) for films in np.split(self.films, self.start[1:-1])]
        users = self.model.tensor("user_vector", {"history": histories})
        items = self.model.tensor("item_vector", _ids(item=np.arange(self.data.seen.shape[1])))
        return users @ items.T


def ncf_figures(model: vv.Model, data: LeaveOneOut, part: str) -> dict[str, float]:
    """Return HR@10 and NDCG@10 among 100."""
    user, item = data.sampled_rows(part)
    ranks = sampled_ranks(model.predict(_ids(user=user, item=item)).reshape(user.shape))
    return {"HR@10 of 100": hit_rate(ranks, 10), "NDCG@10 of 100": ndcg(ranks, 10)}


def tower_figures(towers: Towers, part: str) -> dict[str, float]:
    """Return recall over the catalogue."""
    ranks = towers.data.rank_in_catalogue(towers.scores(), part)
    return {f"recall@{k}": hit_rate(ranks, k) for k in (10, 50, 100)}
