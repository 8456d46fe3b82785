"""A training run drawn from a seed: columns, rows, model, optimizers and solver, of everything that goes together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from viviane.config import SGD, AdaGrad, Adam, AdamW, Ftrl, Lamb, RMSProp, RowWiseAdam, Solver
from viviane.data import Dataset, write_dataset
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.schema import Schema
from viviane.zoo import ZOO

FAMILIES = {
    "plain": ["dcn", "dcn_v2", "deepfm", "dlrm", "wide_deep"], "tasks": ["mmoe", "ple", "shared_bottom"],
    "history": ["din", "bst", "hstu", "sasrec"], "pair": ["ncf", "two_tower"],
}  # fmt: skip
"""Reference models, by the columns that they need."""
ROLES = {"two_tower": {"user": "user", "item": "item"}}
WITHOUT_POOLING = ("hstu", "sasrec")
NUM_IDS = 120


class RandomCase:
    """One drawn case.

    Args:
        seed: of everything.
        device: of the solver.
        num_processes: that train together; several draw sharding and exchange as well.
    """

    def __init__(self, seed: int, device: str = "cpu", num_processes: int = 1) -> None:
        self.seed, self.device = seed, device
        self.refusals: list[str] = []
        rng = random.Random(seed + 4)
        self.family = rng.choice(["layers", "layers", "plain", "plain", *FAMILIES])
        self.zoo = rng.choice(FAMILIES.get(self.family, [""]))
        self.schema = _schema(random.Random(seed), self.family)
        self.num_rows = random.Random(seed + 1).choice([1, 40, 300, 700])
        self.batch_size = random.Random(seed + 2).choice([16, 32, 64])
        self.solver = _solver(random.Random(seed + 3))
        if num_processes > 1:
            tables = {column.table for column in self.schema.categorical}
            self.solver |= _group_solver(random.Random(seed + 9), sorted(tables))
        self.tables = self._tables(random.Random(seed + 5))
        self.optimizer = _optimizer(random.Random(seed + 6), tables=True)
        self.dense_optimizer = _optimizer(random.Random(seed + 7), tables=False)

    def __repr__(self) -> str:
        return (
            f"case {self.seed}: {self.num_rows} rows, {self.solver}, tables {self.tables}, {self.optimizer!r}, "
            f"{self.dense_optimizer!r}, {self.schema.categorical}, {self.family} {self.zoo}"
        )

    def data(self, folder: Path) -> tuple[Dataset, Dataset]:
        """Write rows to train on and to evaluate on."""
        made = []
        for name, count, seed in (("train", self.num_rows, 11), ("valid", 90, 12)):
            made.append(write_dataset(folder / name, self.schema, [self.columns(seed, count)], rows_per_group=64))
        return made[0], made[1]

    def columns(self, seed: int, count: int) -> dict[str, Any]:
        """Draw rows."""
        return self._rows(np.random.default_rng([self.seed, seed]), count)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (rest > 0 and not self.solver.get("drop_last"))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.solver["epochs"]

    def model(self, **solver: Any) -> Model:
        """Make the model, with some settings of the solver changed."""
        settings = {"batch_size": self.batch_size, "device": self.device, "num_threads": 1, **self.solver, **solver}
        model = Model(Solver(**settings), self.schema, name="drawn")
        rng = random.Random(self.seed + 8)
        if self.zoo:
            options = ROLES.get(self.zoo, {}) | self._zoo_options(rng)
            model.add(ZOO[self.zoo](dim=rng.choice([2, 8]), **options))
        else:
            self._add_layers(model, rng)
        model.compile(self.dense_optimizer, embedding_optimizer=self.optimizer)
        return model

    def _tables(self, rng: random.Random) -> dict[str, Any]:
        """Options of single tables."""
        made: dict[str, Any] = {}
        for column in self.schema.categorical:
            options: dict[str, Any] = {}
            raw = column.num_ids is None
            if rng.random() < 0.2:
                options["dtype"] = rng.choice(["bfloat16", "float16"])
            if rng.random() < 0.2:
                options["optimizer"] = _optimizer(rng, tables=True)
            if rng.random() < 0.1:
                options["trainable"] = False
            if raw and rng.random() < 0.5:
                options["dynamic"] = _dynamic(rng)
            if options:
                made[column.table] = options
        return made

    def _zoo_options(self, rng: random.Random) -> dict[str, Any]:
        norm, combiner = rng.choice([None, None, "batch_norm", "layer_norm"]), rng.choice(["sum", "mean"])
        if self.zoo in WITHOUT_POOLING:
            return {"num_heads": rng.choice([1, 2])}
        options: dict[str, Any] = {"combiner": combiner}
        if norm is not None:
            options[norm] = True
        if rng.random() < 0.3:
            options["dropout"] = 0.2
        if rng.random() < 0.2:
            options["embedding_dropout"] = 0.1
        return options

    def _add_layers(self, model: Model, rng: random.Random) -> None:
        dim = rng.choice([1, 3, 8])
        model.add(Input(label="label", sparse="cats", **({"dense": "dense"} if self.schema.dense else {})))
        model.add(SparseEmbedding("emb", bottom="cats", dim=dim, combiner=rng.choice(["sum", "mean"]),
                                  tables=self.tables))  # fmt: skip
        model.add(DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
        top = "flat"
        if self.schema.dense:
            model.add(DenseLayer("x", "Concat", bottom=["flat", "dense"]))
            top = "x"
        for number in range(rng.choice([0, 1, 2])):
            kind = rng.choice(["MLP", "MultiCross", "Dropout", "BatchNorm"])
            options: dict[str, Any] = {
                "MLP": {"num_outputs": [8, 4]}, "MultiCross": {"num_layers": 2}, "Dropout": {"dropout_rate": 0.3},
            }.get(kind, {})  # fmt: skip
            model.add(DenseLayer(f"l{number}", kind, bottom=top, **options))
            top = f"l{number}"
        model.add(DenseLayer("logit", "InnerProduct", bottom=top, num_output=1))
        model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))

    def _rows(self, rng: np.random.Generator, count: int) -> dict[str, Any]:
        rows: dict[str, Any] = {one.name: (rng.random(count) < 0.3).astype(np.float32) for one in self.schema.labels}
        for one in self.schema.dense:
            shape = (count,) if one.dim == 1 else (count, one.dim)
            rows[one.name] = rng.normal(size=shape).astype(np.float32)
        if self.schema.sample_weight is not None:
            rows[self.schema.sample_weight] = rng.choice([0.0, 0.5, 1.0, 3.0], count).astype(np.float32)
        for column in self.schema.categorical:
            draw = _ids if column.num_ids is not None else _raw_ids
            if column.kind == "one_hot":
                rows[column.name] = draw(rng, count).astype(column.dtype)
                continue
            most = column.max_length or 5
            lengths = np.full(count, column.hotness) if column.hotness else rng.integers(0, most + 1, count)
            rows[column.name] = [draw(rng, int(length)).astype(column.dtype) for length in lengths]
            if column.weights is not None:
                rows[column.weights] = [rng.normal(size=int(length)).astype(np.float32) for length in lengths]
        return rows


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Few ids often, many seldom; padding, missing and unknown ones too."""
    return (NUM_IDS * rng.random(count) ** 3).astype(np.int64)


def _raw_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return (_ids(rng, count) - 40) * 987_654_321_987


def _schema(rng: random.Random, family: str) -> Schema:
    if family == "pair":
        pair = [{"name": "user", "num_ids": NUM_IDS}, {"name": "item", "num_ids": rng.choice([NUM_IDS, None])}]
        return Schema(labels=[{"name": "y"}], categorical=pair)
    if family == "history":
        seen = {"name": "seen", "num_ids": NUM_IDS, "kind": "sequence", "max_length": 5, "vocabulary": "item"}
        return Schema(labels=[{"name": "y"}], categorical=[seen, {"name": "item", "num_ids": NUM_IDS}])
    categorical: list[dict[str, Any]] = []
    for number in range(rng.choice([1, 2, 4])):
        raw = rng.random() < 0.3
        one: dict[str, Any] = {"name": f"c{number}", "num_ids": None if raw else NUM_IDS}
        kind = rng.choice(["one_hot", "one_hot", "multi_hot", "sequence"])
        if kind != "one_hot":
            one |= {"kind": kind, "max_length": 5}
            if rng.random() < 0.3:
                one["hotness"] = 3
        if kind == "multi_hot" and rng.random() < 0.4:
            one["weights"] = f"w{number}"
        if not raw and rng.random() < 0.4:
            one["vocabulary"] = "shared"
        categorical.append(one)
    dense = [{"name": f"x{n}", "dim": rng.choice([1, 1, 3])} for n in range(rng.choice([0, 1, 3]))]
    weight = {"sample_weight": "weight"} if rng.random() < 0.3 else {}
    labels = [{"name": "y"}, {"name": "z"}][: 1 + (family == "tasks")]
    return Schema(labels=labels, dense=dense, categorical=categorical, **weight)


def _dynamic(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"initial_capacity": rng.choice([1, 16])}
    if rng.random() < 0.4:
        made |= {"max_capacity": 110, "when_full": "evict",
                 "eviction": rng.choice(["lru", "lfu", "epoch_lru", "epoch_lfu"])}  # fmt: skip
    if rng.random() < 0.4:
        made["absent"] = "initial"
    if rng.random() < 0.3:
        made["admission"] = rng.choice(
            [{"type": "count", "count": 2}, {"type": "probability", "probability": 0.5},
             {"type": "filter", "count": 2, "width": 64}]
        )  # fmt: skip
    return made


def _optimizer(rng: random.Random, *, tables: bool) -> Any:
    decay = rng.choice([0.0, 0.0, 1e-3])
    made: list[Any] = [
        SGD(momentum=rng.choice([0.0, 0.9]), weight_decay=decay), Adam(weight_decay=decay), AdaGrad(weight_decay=decay),
        RMSProp(), AdamW(), Ftrl(lambda1=0.001, lambda2=0.01), Lamb(),
    ]  # fmt: skip
    if tables:
        made += [
            AdaGrad(row_wise=True), RowWiseAdam(), Adam(update="global"), Adam(update="lazy_global"),
            SGD(momentum=0.9, update="global"), Adam(clip_row_norm=0.1),
        ]  # fmt: skip
    return rng.choice(made)


def _group_solver(rng: random.Random, tables: list[str]) -> dict[str, Any]:
    types = ["replicated", "table", "row", "column", "hybrid"]
    made: dict[str, Any] = {"plan": {table: rng.choice(types) for table in tables if rng.random() < 0.7} or "auto"}
    for one in ({"deduplicate_ids": True}, {"wire_dtype": "bfloat16"}, {"dense_wire_dtype": "bfloat16"}):
        if rng.random() < 0.2:
            made |= one
    return made


def _solver(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"lr": 0.02, "seed": rng.choice([0, 3]), "epochs": rng.choice([1, 2, 3])}
    choices: list[dict[str, Any]] = [
        {"clip_grad_norm": 0.3}, {"ema_decay": 0.9}, {"class_weights": (1.0, 4.0)}, {"label_smoothing": 0.1},
        {"drop_last": True}, {"shuffle": False}, {"warmup_steps": 4, "decay_start": 6, "decay_steps": 20},
        {"init_output_bias": False}, {"incremental_checkpoints": 2}, {"async_checkpoint": True}, {"nan_guard": False},
        {"precision": "bf16"}, {"eval_every": 5}, {"deterministic": False},
    ]  # fmt: skip
    for one in choices:
        if rng.random() < 0.2:
            made |= one
    return made
