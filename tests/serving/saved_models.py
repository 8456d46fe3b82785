"""Raw logs with every kind of column, the ETL fitted on them, and saved models of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from viviane.config import Solver
from viviane.data import Dataset
from viviane.etl import EtlConfig, run
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import BST, DCN, DIN, DLRM, NCF, PLE, DCNv2, DeepFM, MMoE, SharedBottom, TwoTower, WideDeep

SMALL = {"dim": 8, "user_mlp": [16], "item_mlp": [16], "out_dim": 8}
ZOO = {
    "wide_deep": WideDeep(dim=4, deep_mlp=[16]),
    "dcn": DCN(dim=4, deep_mlp=[16]),
    "dcn_v2": DCNv2(dim=4, deep_mlp=[16]),
    "dlrm": DLRM(dim=4, bottom_mlp=[8], top_mlp=[16, 8]),
    "deepfm": DeepFM(dim=4, deep_mlp=[16]),
    "din": DIN(history="hist", target="item", dim=8, attention_mlp=[16], top_mlp=[16]),
    "bst": BST(history="hist", target="item", dim=8, num_heads=2, top_mlp=[16]),
    "ncf": NCF(user="user", item="item", dim=8, mlp_layers=[16, 8]),
    "two_tower": TwoTower(user="user", item="item", **SMALL),
    "shared_bottom": SharedBottom(dim=4, bottom_mlp=[16], tower_mlp=[8]),
    "mmoe": MMoE(dim=4, num_experts=2, expert_mlp=[16], tower_mlp=[8]),
    "ple": PLE(dim=4, num_levels=1, num_experts=1, num_shared_experts=1, expert_mlp=[16], tower_mlp=[8]),
}
MULTI_TASK = ("shared_bottom", "mmoe", "ple")
COLUMNS = [
    {"name": "click", "type": "int"},
    {"name": "buy", "type": "int"},
    {"name": "price", "type": "float"},
    {"name": "age", "type": "int"},
    {"name": "user", "type": "string"},
    {"name": "item", "type": "int"},
    {"name": "hist", "type": "int", "separator": "|"},
    {"name": "tags", "type": "string", "separator": ";"},
    {"name": "code", "type": "hex"},
    {"name": "when", "type": "timestamp"},
]


def etl_config(labels: tuple[str, ...]) -> EtlConfig:
    return EtlConfig.from_dict(
        {
            "input": {"columns": COLUMNS},
            "derived": [{"type": "date_part", "name": "weekday", "source": "when", "part": "weekday"}],
            "labels": [{"name": name} for name in labels],
            "dense": [
                {"name": "price", "operators": [{"type": "fill", "value": 0}, {"type": "log"}]},
                {"name": "age", "operators": [{"type": "fill", "value": 0}]},
            ],
            "categorical": [
                {"name": "user", "encoding": {"type": "categorify", "min_count": 2}},
                {"name": "item"},
                {"name": "hist", "kind": "sequence", "max_length": 4, "vocabulary": "item"},
                {"name": "tags", "kind": "multi_hot"},
                {"name": "code", "encoding": {"type": "hash", "num_ids": 40}},
                {"name": "weekday"},
            ],
        }
    )


def raw_rows(count: int, seed: int = 0) -> list[dict]:
    """Rows as logged, with values that are rare, missing, and (seeds other than 0) never seen in training."""
    rng = np.random.default_rng(seed)
    most = 30 if seed == 0 else 45
    rows = []
    for _ in range(count):
        missing = rng.random(10) < 0.1
        row = {
            "click": int(rng.integers(0, 2)),
            "buy": int(rng.integers(0, 2)),
            "price": float(np.round(rng.exponential(5), 3)),
            "age": int(rng.integers(1, 90)),
            "user": f"u{rng.integers(0, 3 * most)}",
            "item": int(rng.integers(0, most)),
            "hist": "|".join(map(str, rng.integers(0, most, rng.integers(1, 7)))),
            "tags": ";".join(f"t{n}" for n in rng.integers(0, most, rng.integers(1, 4))),
            "code": f"{rng.integers(0, 2**32):08x}",
            "when": f"2026-0{rng.integers(1, 10)}-1{rng.integers(0, 10)} 12:00:00",
        }
        for name, gone in zip(row, missing, strict=True):
            if gone and name not in ("click", "buy"):
                row[name] = None
        rows.append(row)
    return rows


def write_csv(rows: list[dict], path: Path) -> Path:
    lines = [",".join(rows[0])]
    lines += [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


class Models:
    """Saved models by name, made when they are requested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        raw = write_csv(raw_rows(600), folder / "raw.csv")
        run(etl_config(("click",)), raw, folder / "one")
        run(etl_config(("click", "buy")), raw, folder / "two")

    def data(self, name: str) -> Dataset:
        return Dataset(self.folder / ("two" if name in MULTI_TASK else "one") / "train")

    def path(self, name: str) -> Path:
        folder = self.folder / "models" / name
        if not folder.exists():
            self.make(name).save(folder)
        return folder

    def make(self, name: str, **solver) -> Model:
        model = Model(Solver(device="cpu", batch_size=200, seed=3, **solver), self.data(name), name=name)
        model.add(ZOO[name])
        model.compile()
        model.fit(self.data(name), epochs=1)
        return model


# Encoded rows, for machines without the ETL's libraries.
ENCODED_ZOO = {**ZOO, "dlrm_one_hot": DLRM(dim=8, bottom_mlp=[16], top_mlp=[32, 16])}
_BAGS = [
    {"name": "hist", "num_ids": 40, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
    {"name": "tags", "num_ids": 30, "kind": "multi_hot", "max_length": 3},
]


def encoded_schema(name: str) -> Schema:
    """The columns that a model reads, one-hot alone for "dlrm_one_hot"."""
    return Schema(
        labels=[{"name": label} for label in (("click", "buy") if name in MULTI_TASK else ("click",))],
        dense=[{"name": "price"}, {"name": "age"}],
        categorical=[
            {"name": "user", "num_ids": 60},
            {"name": "item", "num_ids": 40},
            *([] if name == "dlrm_one_hot" else _BAGS),
        ],
    )


def encoded_rows(count: int, schema: Schema, seed: int = 0) -> dict:
    """Columns of ids and numbers."""
    rng = np.random.default_rng(seed)
    rows = {
        "price": rng.normal(size=count).astype("float32"),
        "age": rng.normal(size=count).astype("float32"),
        "user": rng.integers(0, 60, count),
        "item": rng.integers(0, 40, count),
        "hist": [rng.integers(3, 40, n).tolist() for n in rng.integers(0, 5, count)],
        "tags": [rng.integers(3, 30, n).tolist() for n in rng.integers(0, 4, count)],
    }
    return {name: values for name, values in rows.items() if name in schema.column_names}
