"""How each model is trained on each real data set: settings as any user writes them, chosen on the validation part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from features import Json, adult_etl, criteo_etl, frappe_etl, movielens_etl


@dataclass(frozen=True)
class Case:
    """One model on one data set.

    Args:
        data: a name in `raw_data.DATA_SETS`.
        model: name shown beside the figure.
        etl: the declarative file, or None for the Criteo preset with `etl_flags`.
        train: the training file without its data folders.
        goal: test AUC aimed at, mean over seeds (and folds).
        goal_log_loss: test log loss aimed at, where one is set.
        folds: number of folds, 1 for a single split.
        note: what a reader must know to compare the figure.
    """

    data: str
    model: str
    etl: Json
    train: Json
    goal: float
    goal_log_loss: float | None = None
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
    batch_size: int,
    epochs: int,
    embedding_decay: float = 0.0,
    dense_decay: float = 0.0,
    **solver: object,
) -> Json:
    """A training file: Adam everywhere, the best evaluation's weights in the end."""
    return {
        "model": model,
        "optimizer": {"type": "adam", "weight_decay": dense_decay},
        "embedding_optimizer": {"type": "adam", "weight_decay": embedding_decay},
        "solver": {"lr": lr, "batch_size": batch_size, "epochs": epochs, "restore_best": True, **solver},
    }


CASES: list[Case] = []
