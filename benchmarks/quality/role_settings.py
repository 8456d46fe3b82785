"""Cases of the models with roles: histories, pairs of ids, several labels. No figure of others is to be reached."""

from __future__ import annotations

from features import AMOUNTS, STANDARD, TRAITS, Json, categorical, movielens_etl
from settings import Case, training

HISTORY = 20


def beauty_etl() -> Json:
    """A user's earlier items, newest last, and the item in question; equal items have equal ids."""
    items = {"vocabulary": "item", "encoding": {"type": "categorify", "min_count": 1}}
    return {
        "input": {"columns": [{"name": "label", "type": "int"}, {"name": "item"}, {"name": "history", "list": True}]},
        "labels": [{"name": "label"}],
        "categorical": [
            {"name": "item", **items},
            {"name": "history", "kind": "sequence", "max_length": HISTORY, **items},
        ],
    }


def adult_tasks_etl() -> Json:
    """Income and never married; marital status and relationship, which tell the second, are left out."""
    traits = [name for name in TRAITS if name not in ("marital_status", "relationship")]
    return {
        "input": {
            "columns": [
                {"name": "income", "type": "int"},
                {"name": "never_married", "type": "int"},
                *({"name": name} for name in traits),
                *({"name": name, "type": "int"} for name in AMOUNTS),
            ]
        },
        "labels": [{"name": "income"}, {"name": "never_married"}],
        "dense": [{"name": name, "operators": list(STANDARD)} for name in AMOUNTS],
        "categorical": categorical(traits, 3),
    }


def _beauty(name: str, model: Json) -> Case:
    settings = training(
        {**model, "dim": 32, "dropout": 0.2, "top_mlp": [64, 32]},
        lr=0.001, table_lr=0.001, table_decay=1e-5, init=0.05,
        batch_size=512, steps=512, epochs=6, evaluations=1, patience=2,
    )  # fmt: skip
    return Case("amazon_beauty", name, beauty_etl(), settings, note="one random negative for each item")


def _pairs(name: str, model: Json, **solver: object) -> Case:
    roles = {"user": "user_id", "item": "movie_id", "dim": 32}
    settings = training(
        {**model, **roles},
        lr=0.001, table_lr=0.002, table_decay=2e-5, init=0.03,
        batch_size=2048, steps=288, epochs=12, evaluations=1, patience=3, **solver,
    )  # fmt: skip
    return Case("ml1m", name, movielens_etl(), settings, note="the ids of user and film alone")


def _adult(name: str, model: Json) -> Case:
    settings = training(
        {**model, "dim": 8, "tower_mlp": [32], "dropout": 0.1},
        lr=0.002, table_lr=0.002, table_decay=1e-5, init=0.03,
        batch_size=256, steps=114, epochs=12, evaluations=1, patience=3,
    )  # fmt: skip
    return Case("adult_tasks", name, adult_tasks_etl(), settings, note="mean of income and never married")


ROLE_CASES: list[Case] = [
    _beauty("DIN", {"zoo": "din", "attention_mlp": [32, 16]}),
    _beauty("BST", {"zoo": "bst", "num_heads": 2}),
    _beauty("mean of the history", {"zoo": "din", "pooling": "mean"}),
    _pairs("NeuMF", {"zoo": "ncf", "mlp_layers": [64, 32, 16], "dropout": 0.2}),
    _pairs("two-tower", {"zoo": "two_tower", "user_mlp": [64], "item_mlp": [64], "temperature": 0.1}),
    _adult("shared bottom", {"zoo": "shared_bottom", "bottom_mlp": [64, 32]}),
    _adult("MMoE", {"zoo": "mmoe", "num_experts": 4, "expert_mlp": [64, 32]}),
    _adult("PLE", {"zoo": "ple", "expert_mlp": [64, 32]}),
]
