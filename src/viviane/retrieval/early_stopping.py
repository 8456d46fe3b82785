"""Full-catalogue metrics during training, which select the best weights by retrieval quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from viviane.model import Model
from viviane.retrieval.evaluation import evaluate_vectors
from viviane.retrieval.histories import Histories, Ids
from viviane.retrieval.rows import Roles, all_items, vectors
from viviane.training import Callback
from viviane.training.history import CATALOGUE
from viviane.training.trainer_base import TrainerBase


class CatalogueEvaluation(Callback):
    """Ranks the complete catalogue at each evaluation of `fit`; NDCG at the largest k is the lead metric.

    `Solver.patience` then stops when NDCG stops improving, and `restore_best` restores the best weights.

    Args:
        model: with the tensors "user_vector" and "item_vector", such as `viviane.zoo.SASRec` and `TwoTower`.
        histories: histories of the validation users.
        item: the next item of each user, (B,).
        seen: items excluded from the ranking; None: the histories.
        k: list lengths.
        more: other columns for the user's vector, by name.

    Example:
        >>> from viviane import Adam, Solver, zoo
        >>> from viviane.schema import Schema
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "hist", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}])
        >>> model = Model(Solver(device="cpu"), schema)
        >>> model.add(zoo.SASRec(dim=8)); model.compile(Adam())
        >>> check = CatalogueEvaluation(model, Histories.of([[3, 4]]), [5])
        >>> sorted(check.measure(model.trainer))[:2]
        ['catalogue/coverage@10', 'catalogue/hr@10']
    """

    def __init__(
        self,
        model: Model,
        histories: Any,
        item: Ids | Sequence[int],
        *,
        seen: Any = None,
        k: Sequence[int] = (10,),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.histories = Histories.of(histories)
        self.wanted = Histories.of([[one] for one in item])
        self.seen = self.histories if seen is None else Histories.of(seen)
        self.k = tuple(k)
        self.more = dict(more or {})
        self.roles = Roles.of(model.schema)
        names = [f"{kind}@{one}" for one in self.k for kind in ("hr", "recall", "ndcg", "coverage")]
        lead = f"ndcg@{max(self.k)}"
        self.measures = tuple(f"{CATALOGUE}/{name}" for name in [lead, *(n for n in names if n != lead), "mrr"])

    def measure(self, trainer: TrainerBase) -> dict[str, float]:
        """Return the metrics of the current weights."""
        found = catalogue_metrics(
            self.model, self.histories, self.wanted, seen=self.seen, k=self.k, more=self.more, roles=self.roles
        )
        return {f"{CATALOGUE}/{name}": value for name, value in found.items()}


def catalogue_metrics(
    model: Model,
    histories: Histories,
    wanted: Histories,
    *,
    seen: Histories | None = None,
    k: Sequence[int] = (10,),
    more: Mapping[str, Any] | None = None,
    roles: Roles | None = None,
) -> dict[str, float]:
    """Rank the complete catalogue for each history, on the model's device; see `viviane.retrieval.evaluation`."""
    roles = roles or Roles.of(model.schema)
    users = user_vectors(model, histories, roles, more)
    items = vectors(model, "item_vector", roles.num_items, {roles.item: all_items(roles)})
    device = model.trainer.device
    return evaluate_vectors(users, items, wanted, seen=seen, k=k, device=device)


def user_vectors(model: Model, histories: Histories, roles: Roles, more: Mapping[str, Any] | None = None) -> Any:
    """Return the vectors of users with these histories, (B, d)."""
    columns: dict[str, Any] = dict(more or {})
    if roles.history is not None:
        columns[roles.history] = histories
    return vectors(model, "user_vector", len(histories), columns)
