"""What the estimators train: models with settings that follow the number of rows and of positives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane import zoo
from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError, expect
from viviane.data import Dataset
from viviane.embedding import NormalInit
from viviane.model import Model
from viviane.model.nodes import Node
from viviane.schema import Schema
from viviane.sklearn.linear import Linear
from viviane.training import Callback, History
from viviane.zoo import ZOO, ZooModel

SMALL_ROWS: Final = 100_000
"""Up to so many rows every row is held out once; of more, one part is."""


@dataclass(frozen=True)
class Member:
    """A model and how it is trained.

    Args:
        name: for messages.
        recipe: writes the graph for a schema.
        lr, table_lr: learning rates of dense layers and of tables.
        dense_decay, table_decay: L2 on dense weights and on the rows of tables, which all decay in each step.
        batch_size, epochs, patience, evaluations: patience counts evaluations, of which each epoch has several.
    """

    name: str
    recipe: Any
    lr: float = 1e-3
    table_lr: float = 1e-3
    dense_decay: float = 1e-5
    table_decay: float = 1e-4
    batch_size: int = 256
    epochs: int = 15
    patience: int = 4
    evaluations: int = 2
    solver: Mapping[str, Any] = field(default_factory=dict)

    def fit(
        self,
        train: Dataset,
        held: Dataset,
        *,
        lead: str,
        seed: int,
        schema: Schema | None = None,
        callbacks: tuple[Callback, ...] = (),
        silent: bool = False,
    ) -> tuple[Model, History]:
        """Train on one data set and keep the weights that are best on the other; silent, without progress."""
        steps = max(len(train) // self.batch_size, 1)
        settings: dict[str, Any] = {
            "batch_size": self.batch_size,
            "lr": self.lr,
            "epochs": self.epochs,
            "drop_last": len(train) >= self.batch_size,
            "eval_every": max(steps // self.evaluations, min(steps, 20), 1),
            "patience": self.patience,
            "restore_best": True,
            "warmup_steps": max(steps // 5, 1),
            "decay_start": 1,
            "decay_steps": self.epochs * steps,
            "decay_power": 1.0,
            "ema_decay": 0.99,
            "seed": seed,
            **self.solver,
        }
        model = Model(Solver(**settings), schema or train.schema, name=self.name)
        model.etl = train.path / "etl.zip"
        model.add(self.recipe)
        tables = Adam(lr=self.table_lr, weight_decay=self.table_decay, update="global")
        model.compile(Adam(weight_decay=self.dense_decay), tables, metrics=[lead, *_others(lead)])
        return model, model.fit(train, held, callbacks=callbacks, verbose=0 if silent else None)


def _others(lead: str) -> list[str]:
    return [name for name in ("log_loss", "auc") if name != lead] if not lead.startswith("mean") else []


@dataclass(frozen=True)
class Size:
    """What the settings follow: rows, those of the rarer class, ids of all columns."""

    rows: int
    positives: float
    num_ids: int

    @classmethod
    def of(cls, schema: Schema, y: NDArray[np.float64]) -> Size:
        """Count."""
        ids = sum(column.num_ids or 0 for column in schema.categorical)
        return cls(len(y), float(min(y.sum(), len(y) - y.sum())), ids)

    @property
    def batch_size(self) -> int:
        """About 100 steps an epoch for small data and 250 for large, with batches of 64 to 8192 rows."""
        steps = 100 if self.rows <= SMALL_ROWS else 250
        return int(min(max(2 ** round(np.log2(max(self.rows, 1) / steps)), 64), 8192))


def automatic(schema: Schema, size: Size) -> list[Member]:
    """Return the members of `model="auto"`: linear models, a factorisation machine with a network, Wide & Deep.

    Held-out rows weigh them. So the members differ where data sets do: a slow linear model for effects that are small
    and a fast one for large ones; of large data, weak and strong decay of the vectors.
    """
    few = size.rows <= SMALL_ROWS
    base = Member("auto", None, batch_size=size.batch_size, epochs=15)
    prior = 1.0 / max(size.rows, 1)  # weight decay of a Gaussian prior with deviation 1
    linear = replace(base, name="linear", recipe=Linear(decay=8 * prior), table_lr=2e-3, lr=2e-3)
    fast = replace(base, name="linear_fast", recipe=Linear(decay=4 * prior, lr=1e-2), table_lr=1e-2, lr=1e-2)
    if not schema.categorical:
        return [linear, fast]
    slow = Adam(lr=2e-3, weight_decay=8 * prior, update="global")
    deepfm = replace(
        base, name="deepfm", table_decay=(60 if few else 600) * prior, table_lr=2e-3,
        recipe=zoo.DeepFM(dim=8 if few else 16, deep_mlp=(64, 32) if few else (256, 128), dropout=0.3 if few else 0.2,
                          embedding_dropout=0.3 if few else 0.0, init=NormalInit(std=0.05), linear_optimizer=slow),
    )  # fmt: skip
    wide = replace(
        base, name="wide_deep", table_decay=(20 if few else 60) * prior, table_lr=1e-3 if few else 2e-3,
        recipe=zoo.WideDeep(dim=8 if few else 16, deep_mlp=(64, 32) if few else (256, 128), dropout=0.3 if few else 0.2,
                            embedding_dropout=0.2 if few else 0.0, init=NormalInit(std=0.05), linear_optimizer=slow),
    )  # fmt: skip
    return [linear, fast, deepfm, wide] if few else [deepfm, wide]


def named(model: str | ZooModel, size: Size, multitask: bool = False) -> Member:
    """Return the member of a model of the zoo, by name or by its settings.

    Raises:
        ConfigError: no such model; neither a name nor a model of the zoo.
    """
    expect("model", model, str, ZooModel)
    few = size.rows <= SMALL_ROWS
    prior = 1.0 / max(size.rows, 1)
    if isinstance(model, str):
        if model == "linear":
            return Member("linear", Linear(decay=8 * prior), batch_size=size.batch_size, table_lr=2e-3, lr=2e-3)
        recipe: Any = _default(ZOO[model], few)
    else:
        recipe = model
    name = next((known for known in ZOO if ZOO[known] is type(recipe)), "model")
    return Member(name, recipe, batch_size=size.batch_size, epochs=15 if few else 10, table_decay=40 * prior,
                  table_lr=2e-3)  # fmt: skip


def _default(kind: Callable[..., ZooModel], few: bool) -> ZooModel:
    """Return a model of the zoo with the widths and the dropout of small or of large data."""
    known = getattr(kind, "model_fields", {})
    small: dict[str, Any] = {
        "dim": 8, "deep_mlp": (64, 32), "expert_mlp": (64, 32), "bottom_mlp": (64, 32), "tower_mlp": (32,),
        "dropout": 0.3, "embedding_dropout": 0.2, "init": NormalInit(std=0.05),
    }  # fmt: skip
    large: dict[str, Any] = {"dropout": 0.2, "embedding_dropout": 0.2, "init": NormalInit(std=0.05)}
    chosen = {name: value for name, value in (small if few else large).items() if name in known}
    try:
        return kind(**chosen)
    except ConfigError as error:
        what = "this model of the zoo has settings without a default"
        fix = "pass the model with its settings, such as vv.zoo.TwoTower(user=..., item=...)"
        raise ConfigError(what, value=getattr(kind, "__name__", str(kind)), fix=fix) from error


def graph(member: Member, schema: Schema) -> list[Node]:
    """Return the nodes that a member writes."""
    found: list[Node] = list(member.recipe.nodes(schema))
    return found
