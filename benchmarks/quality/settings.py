"""How each model is trained on each real data set: settings as any user writes them; lab-notes.md says how chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from features import ADULT_DEEP, ADULT_WIDE, Json, adult_etl, criteo_etl, frappe_etl, movielens_etl


@dataclass(frozen=True)
class Case:
    """One model on one data set.

    Args:
        data: a name in `raw_data.DATA_SETS`.
        model: name shown beside the figure.
        etl: the declarative file.
        train: the training file without its data folders.
        goal: test AUC aimed at, mean over seeds (and folds); None where nothing comparable is known.
        goal_log_loss: test log loss aimed at, where one is set.
        label_goals: the same for each label's AUC, of a model of several.
        published: what stands beside the AUC, or each label's, as another program's figure.
        beside: for the AUC, or each label's, the case that a reader compares with, run before this one.
        folds: number of folds, 1 for a single split.
        note: what a reader must know to compare the figure.
    """

    data: str
    model: str
    etl: Json
    train: Json
    goal: float | None = None
    goal_log_loss: float | None = None
    label_goals: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    folds: int = 1
    note: str = ""
    seeds: Sequence[int] = field(default=(1, 2, 3))

    @property
    def name(self) -> str:
        """Shown in tables."""
        return f"{self.data}, {self.model}" + (f" ({self.note})" if self.note else "")


def training(
    model: Json,
    *,
    lr: float,
    table_lr: float,
    steps: int,
    epochs: int,
    evaluations: int,
    warmup: float = 1.0,
    decay_power: float = 0.0,
    table_decay: float = 0.0,
    linear_decay: float | None = None,
    dense_decay: float = 0.0,
    init: float,
    lead: str = "auc",
    **solver: object,
) -> Json:
    """A training file: Adam everywhere, and the weights of the best evaluation in the end.

    Args:
        lr, table_lr: learning rates of the dense layers and of the tables.
        steps: in an epoch; the schedule and `evaluations` (in an epoch) are stated in epochs.
        warmup: epochs over which the rates rise.
        decay_power: of the decay to 0 at the end of the last epoch; 0 keeps them.
        table_decay, linear_decay, dense_decay: L2 on the tables' rows of a batch, on those of dim 1, on the rest.
        init: standard deviation of the tables' first values.
        lead: metric that early stopping watches.
    """
    decay = {"decay_start": 1, "decay_steps": epochs * steps, "decay_power": decay_power} if decay_power else {}
    tables = {"type": "adam", "lr": table_lr}
    linear = {} if linear_decay is None else {"linear_optimizer": {**tables, "weight_decay": linear_decay}}
    return {
        "model": {**model, "init": {"type": "normal", "std": init}, **linear},
        "optimizer": {"type": "adam", "weight_decay": dense_decay},
        "embedding_optimizer": {**tables, "weight_decay": table_decay},
        "metrics": [lead, "log_loss" if lead == "auc" else "auc"],
        "solver": {
            "lr": lr, "epochs": epochs, "warmup_steps": max(round(warmup * steps), 1), **decay,
            "eval_every": steps // evaluations, "drop_last": True, "restore_best": True,
            "num_threads": 1,  # layers this small gain nothing from a second core
            **solver,
        },
    }  # fmt: skip


ADULT = Case(
    "adult", "Wide&Deep", adult_etl(), goal=0.925,
    train=training(
        {"zoo": "wide_deep", "dim": 8, "deep_mlp": [256, 128], "embedding_dropout": 0.2,
         "wide": ADULT_WIDE, "deep": ADULT_DEEP},
        lr=0.0025, table_lr=0.00125, table_decay=2.6e-6, linear_decay=2.6e-7, init=0.003,
        batch_size=256, steps=114, epochs=8, evaluations=2, patience=6,
    ),
)  # fmt: skip

CRITEO_TB = Case(
    "criteo_tb_80k", "DeepFM", criteo_etl(min_count=50, quantiles=20, text=False), folds=5,
    goal=0.722, goal_log_loss=0.1320,
    note="the log loss to reach is the best of six gradient-boosted tree models on the same folds",
    train=training(
        {"zoo": "deepfm", "dim": 16, "deep_mlp": [128, 64], "dropout": 0.5, "embedding_dropout": 0.5},
        lr=0.0029, table_lr=0.0058, table_decay=0.0029, linear_decay=5.9e-5, dense_decay=7e-5, init=0.01,
        batch_size=512, steps=109, epochs=8, evaluations=2, patience=5, decay_power=1.0, ema_decay=0.99,
        lead="log_loss",
    ),
)  # fmt: skip

CRITEO_KAGGLE = Case(
    "criteo_kaggle_10k", "Wide&Deep", criteo_etl(min_count=5, quantiles=None, text=True), goal=0.739,
    note="454 clicks in the test part: standard error .014",
    train=training(
        {"zoo": "wide_deep", "dim": 16, "deep_mlp": [64, 32], "dropout": 0.3, "embedding_dropout": 0.3},
        lr=0.001, table_lr=0.002, table_decay=1.1e-6, linear_decay=0.0, dense_decay=7.6e-6, init=0.03,
        batch_size=256, steps=27, epochs=15, evaluations=2, patience=5, warmup=0.2, decay_power=1.0,
        ema_decay=0.99, lead="log_loss",
    ),
)  # fmt: skip

MOVIELENS = [
    Case(
        "ml1m", "DLRM", movielens_etl(), goal=0.8890,
        train=training(
            {"zoo": "dlrm", "dim": 32, "top_mlp": [64], "concat_embeddings": True},
            lr=0.00075, table_lr=0.00225, table_decay=4.6e-5, init=0.003,
            batch_size=2048, steps=288, epochs=15, evaluations=2, patience=4, decay_power=1.0, ema_decay=0.99,
        ),
    ),
    Case(
        "ml1m", "DeepFM", movielens_etl(), goal=0.8932,
        train=training(
            {"zoo": "deepfm", "dim": 16, "deep_mlp": [256, 128], "layer_norm": True, "dropout": 0.3,
             "embedding_dropout": 0.3},
            lr=0.002, table_lr=0.004, table_decay=2.2e-6, linear_decay=1e-7, init=0.1,
            batch_size=2048, steps=288, epochs=15, evaluations=2, patience=4, warmup=0.0, ema_decay=0.999,
        ),
    ),
    Case(
        "ml1m", "DCN v2", movielens_etl(), goal=0.8950,
        train=training(
            {"zoo": "dcn_v2", "dim": 64, "num_cross_layers": 2, "deep_mlp": [512, 256, 128], "dropout": 0.5,
             "embedding_dropout": 0.1},
            lr=0.005, table_lr=0.01, table_decay=7e-7, dense_decay=1.1e-5, init=0.1,
            batch_size=2048, steps=288, epochs=10, evaluations=2, patience=4, warmup=0.0, decay_power=2.0,
            ema_decay=0.995,
        ),
    ),
]  # fmt: skip


def _frappe(name: str, goal: float, epochs: int, model: Json) -> Case:
    settings = training(
        {**model, "dim": 64, "dropout": 0.1, "batch_norm": True},
        lr=0.002, table_lr=0.002, table_decay=0.02, init=0.01,
        batch_size=4096, steps=49, epochs=epochs, evaluations=1, patience=5, ema_decay=0.995,
    )  # fmt: skip
    return Case("frappe", name, frappe_etl(), settings, goal)


FRAPPE = [
    _frappe("DLRM", 0.9840, 22, {"zoo": "dlrm", "top_mlp": [512, 256], "concat_embeddings": True}),
    _frappe("DCN v2", 0.9830, 30, {"zoo": "dcn_v2", "num_cross_layers": 2, "deep_mlp": [512, 256]}),
]

CASES: list[Case] = [CRITEO_TB, CRITEO_KAGGLE, *MOVIELENS, *FRAPPE, ADULT]
