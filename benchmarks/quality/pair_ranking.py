"""NCF and two-tower on MovieLens 1M: ranking a held-out film of each user, see `leave_one_out`.

Trained for a number of epochs that the validation films chose; each epoch of NCF draws four new films that the user
has not rated in training for each of his films, as its paper does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from leave_one_out import FIRST_ID, Ids, LeaveOneOut, hit_rate, ndcg, sampled_ranks

import viviane as vv
from viviane.schema import Schema

NEGATIVES = 4
NCF: dict[str, Any] = {
    "dim": 32, "mlp_layers": [64, 32, 16], "embedding_dropout": 0.1, "init": {"type": "normal", "std": 0.05},
}  # fmt: skip
NCF_EPOCHS, NCF_BATCH = 6, 4096
TOWERS: dict[str, Any] = {
    "dim": 64, "user_mlp": [64], "item_mlp": [64], "out_dim": 32, "temperature": 0.1,
    "init": {"type": "normal", "std": 0.1},
}  # fmt: skip
TOWER_EPOCHS, TOWER_BATCH = 9, 2048


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


def train_towers(data: LeaveOneOut, seed: int, device: str = "cpu", epochs: int = TOWER_EPOCHS) -> vv.Model:
    """Train two towers on the rated films, the batch's other films as wrong answers."""
    rng = np.random.default_rng(seed)
    recipe, tables = vv.zoo.TwoTower(user=["user"], item=["item"], **TOWERS), vv.Adam(lr=0.005, weight_decay=1e-5)
    solver = _solver(TOWER_BATCH, 0.0005, 15 * (len(data.user) // TOWER_BATCH), seed, device)
    model = _model(data, recipe, tables, solver)
    for _ in range(epochs):
        order = rng.permutation(len(data.user))
        _epoch(model, data.user[order], data.item[order], np.ones(len(order)))
    return model


def ncf_figures(model: vv.Model, data: LeaveOneOut, part: str) -> dict[str, float]:
    """Return HR@10 and NDCG@10 among 100."""
    user, item = data.sampled_rows(part)
    ranks = sampled_ranks(model.predict(_ids(user=user, item=item)).reshape(user.shape))
    return {"HR@10 of 100": hit_rate(ranks, 10), "NDCG@10 of 100": ndcg(ranks, 10)}


def tower_figures(model: vv.Model, data: LeaveOneOut, part: str) -> dict[str, float]:
    """Return recall over the catalogue."""
    users, items = (np.arange(count) for count in data.seen.shape)
    scores = model.tensor("user_vector", _ids(user=users)) @ model.tensor("item_vector", _ids(item=items)).T
    ranks = data.rank_in_catalogue(scores, part)
    return {f"recall@{k}": hit_rate(ranks, k) for k in (10, 50, 100)}
