"""Models of every kind that is exported, with weights that make each column count, and rows for them."""

from collections.abc import Mapping

import numpy as np
import torch

from viviane.config import Adam, Solver
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import (
    BST,
    DCN,
    DIN,
    DLRM,
    HSTU,
    NCF,
    PLE,
    DCNv2,
    DeepFM,
    MMoE,
    SASRec,
    SharedBottom,
    TwoTower,
    WideDeep,
)

MANY = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "hour"}, {"name": "vec", "dim": 3}],
    categorical=[
        {"name": "user", "num_ids": 12},
        {"name": "hist", "num_ids": 43, "kind": "sequence", "max_length": 8, "vocabulary": "item"},
        {"name": "item", "num_ids": 43},
        {"name": "tags", "num_ids": 20, "kind": "multi_hot", "weights": "tag_weights"},
        {"name": "raw", "num_ids": None},
    ],
)
TASKS = Schema(
    labels=[{"name": "click"}, {"name": "stay", "task": "regression"}],
    dense=[{"name": "hour"}],
    categorical=[
        {"name": "user", "num_ids": 12},
        {"name": "item", "num_ids": 43},
        {"name": "tags", "num_ids": 20, "kind": "multi_hot"},
    ],
)
BINARY = Schema(labels=[{"name": "click"}, {"name": "buy"}], dense=TASKS.dense, categorical=TASKS.categorical)
PAIR = Schema(
    labels=[{"name": "click"}], categorical=[{"name": "user", "num_ids": 12}, {"name": "item", "num_ids": 43}]
)
NEXT = Schema(labels=[{"name": "click"}], categorical=[MANY.categorical[1], MANY.categorical[2]])

ZOO = {
    "dlrm": (DLRM(dim=8, bottom_mlp=[16, 8], top_mlp=[16]), MANY),
    "dcn": (DCN(dim=4, deep_mlp=[16]), MANY),
    "dcn_v2": (DCNv2(dim=4, deep_mlp=[16], combiner="mean"), MANY),
    "deepfm": (DeepFM(dim=4, deep_mlp=[16]), MANY),
    "wide_deep": (WideDeep(dim=4, deep_mlp=[16]), MANY),
    "din": (DIN(dim=8, attention_mlp=[16], top_mlp=[16]), MANY),
    "bst": (BST(dim=8, num_heads=2, top_mlp=[16]), MANY),
    "ncf": (NCF(dim=8), PAIR),
    "shared_bottom": (SharedBottom(dim=8, bottom_mlp=[16], tower_mlp=[8]), BINARY),
    "mmoe": (MMoE(dim=8, num_experts=3, expert_mlp=[16], tower_mlp=[8], combiner="mean"), BINARY),
    "ple": (PLE(dim=8, expert_mlp=[16], tower_mlp=[8]), BINARY),
    "two_tower": (TwoTower(dim=8, user=["user"], item=["item"]), PAIR),
    "sasrec": (SASRec(dim=8, num_blocks=2), NEXT),
    "hstu": (HSTU(dim=8, num_blocks=2), NEXT),
}


def rows(schema: Schema, count: int, seed: int = 0, *, raw_range: int = 40) -> dict:
    """Columns of ids as the ETL writes them, with empty bags."""
    rng = np.random.default_rng(seed)
    columns = {}
    for dense in schema.dense:
        shape = (count, dense.dim) if dense.dim > 1 else count
        columns[dense.name] = rng.normal(size=shape).astype("float32")
    for column in schema.categorical:
        high = column.num_ids or raw_range
        if column.kind == "one_hot":
            columns[column.name] = rng.integers(0, high, count)
            continue
        lengths = rng.integers(0, (column.max_length or 5) + 1, count)
        columns[column.name] = [rng.integers(0, high, length) for length in lengths]
        if column.weights is not None:
            columns[column.weights] = [rng.random(length).astype("float32") for length in lengths]
    return columns


def labels(schema: Schema, count: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {label.name: rng.integers(0, 2, count).astype("float32") for label in schema.labels}


def strengthen(model: Model, seed: int = 0) -> None:
    """Give weights a size at which every column and every layer moves the prediction."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for collection in collections_of(model.module).values():
            for name, table in collection.tables.items():
                rows = collection.table_rows(name)
                rows.copy_(torch.randn(rows.shape, generator=draw))
                if table.padding_id is not None and hasattr(table, "num_rows"):
                    rows[table.padding_id] = 0.0
        for parameter in dense_parameters(model.module).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw).to(parameter.device))


def made(recipe, schema: Schema, *, solver: Mapping = {}) -> Model:
    """A compiled model that has taken a step, so that dynamic tables have keys."""
    model = Model(Solver(device="cpu", **solver), schema)
    model.add(recipe)
    model.compile(Adam())
    trained(model)
    return model


def trained(model: Model) -> None:
    from viviane.batch import Batch

    schema = model.schema
    model.trainer.train_step(Batch.from_columns(schema, rows(schema, 32) | labels(schema, 32)))
    strengthen(model)
