"""A model with every kind of lookup, and batches that move its weights."""

from __future__ import annotations

import numpy as np
import torch

import viviane as vv
from viviane.batch import Bag, Batch, Layout
from viviane.embedding import DynamicOptions
from viviane.model.publication import Publication


def build(seed: int = 0) -> vv.Model:
    """One-hot, small, dynamic and pooled tables; widths that rows are padded for, and that they are not."""
    schema = vv.Schema(
        labels=[{"name": "y"}],
        dense=[{"name": "d"}],
        categorical=[{"name": "item", "num_ids": 300}, {"name": "city", "num_ids": 4},
                     {"name": "user", "num_ids": None}, {"name": "past", "num_ids": 300, "kind": "multi_hot"}],
    )  # fmt: skip
    model = vv.Model(vv.Solver(device="cpu", seed=seed, batch_size=64, lr=0.05, shuffle=False), schema)
    groups = {"one": ["item", "city"], "many": ["item", "past"], "users": ["user"]}
    model.add(vv.Input(label="y", dense="d", sparse=groups))
    model.add(vv.SparseEmbedding("wide", bottom="one", dim=8))
    model.add(vv.SparseEmbedding("odd", bottom="many", dim=3, combiner="mean"))
    model.add(vv.SparseEmbedding("users_emb", bottom="users", dim=4, dynamic=DynamicOptions(absent="initial")))
    for name in ("wide", "odd", "users_emb"):
        model.add(vv.DenseLayer(f"{name}_flat", "Reshape", bottom=name, shape=[-1]))
    model.add(vv.DenseLayer("x", "Concat", bottom=["wide_flat", "odd_flat", "users_emb_flat", "d"]))
    model.add(vv.DenseLayer("deep", "MLP", bottom="x", num_outputs=[16]))
    model.add(vv.DenseLayer("logit", "InnerProduct", bottom="deep", num_output=1))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "y"]))
    model.compile(vv.AdaGrad(lr=0.05))
    return model


def click_batch(seed: int, count: int = 64) -> Batch:
    random = np.random.default_rng(seed)
    ids = np.stack([random.integers(1, 300, count), random.integers(0, 4, count), random.integers(-5, 40, count)], 1)
    bag = Bag.from_lists([random.integers(1, 300, random.integers(0, 5)).tolist() for _ in range(count)])
    schema = build().schema
    labels = torch.from_numpy(random.integers(0, 2, (count, 1)).astype(np.float32))
    dense = torch.from_numpy(random.random((count, 1), dtype=np.float32))
    return Batch(Layout.of(schema), labels, dense, torch.from_numpy(ids), {"past": bag})


def train(model: vv.Model, steps: int, first: int = 0, publication: Publication | None = None) -> None:
    """Move the model's weights; the tables get other rows, the dynamic one new keys."""
    for seed in range(first, first + steps):
        batch = click_batch(seed)
        model.trainer.train_step(batch)
        if publication is not None:
            publication.mark(batch)
