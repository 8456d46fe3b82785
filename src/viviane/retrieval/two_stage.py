"""Training of two stages: a ranker on the sources' candidates, and model selection on validation users.

The sources are built from each user's events except the last one. For most users the ranker learns from that last
event;
for the others it is used for validation: the ranker stops when NDCG over the complete catalogue stops improving there,
and the result is the best variant there, a single source or both stages. Test events are never used.

Negatives of the ranker are the highest candidates of the sources, which it will have to distinguish later, and some
drawn from the complete catalogue, so that it also learns from easy negatives (mixed negatives).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from viviane.config import Adam, Solver
from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.data import write_dataset
from viviane.model import Model
from viviane.model.nodes import Recipe
from viviane.retrieval.candidates import NO_ITEM, Candidates, CandidateSource, drop_seen, in_order
from viviane.retrieval.evaluation import CatalogueMetrics
from viviane.retrieval.histories import Histories, Ids, leave_one_out
from viviane.retrieval.popularity import Popularity
from viviane.retrieval.ranking import feature_names, features
from viviane.retrieval.recommender import Recommender
from viviane.schema import RESERVED, Schema
from viviane.training import Callback
from viviane.training.history import CATALOGUE
from viviane.training.trainer_base import TrainerBase


class TwoStageSettings(Settings):
    """Settings of training the second stage.

    Args:
        num_candidates: number of candidates per source.
        k: length of the lists that validation compares by NDCG.
        ranking_share: fraction of users whose last event trains the ranker; the others validate.
        hard_negatives, random_negatives: per user, from the candidates and from the catalogue.
        max_history: number of newest items that the ranker reads.
        seed: seed of the split and the negatives.
    """

    num_candidates: int = Field(default=50, ge=1)
    k: int = Field(default=10, ge=1)
    ranking_share: float = Field(default=0.8, gt=0, lt=1)
    hard_negatives: int = Field(default=30, ge=1)
    random_negatives: int = Field(default=5, ge=0)
    max_history: int = Field(default=20, ge=1)
    seed: int = 1


@dataclass(frozen=True)
class TwoStage:
    """Result of the training.

    Args:
        recommender: the best variant on validation.
        chosen: its name: a source's, or "two stages".
        validation: NDCG at k of every variant, for the validation users.
        both: both stages, whichever variant was chosen.
    """

    recommender: Recommender
    chosen: str
    validation: dict[str, float]
    both: Recommender


TWO_STAGES = "two stages"


def ranking_schema(sources: Sequence[CandidateSource], num_items: int, max_history: int) -> Schema:
    """Return the columns of a ranker: history, candidate, the sources' scores, and whether it was taken.

    Example:
        >>> [one.name for one in ranking_schema([], 9, 4).categorical]
        ['history', 'item']
    """
    return Schema(
        labels=[{"name": "taken"}],
        dense=[{"name": name} for name in feature_names(sources)],
        categorical=[
            {
                "name": "history", "num_ids": num_items, "kind": "sequence", "max_length": max_history,
                "hotness": max_history, "vocabulary": "item",
            },
            {"name": "item", "num_ids": num_items},
        ],
    )  # fmt: skip


def fit_two_stage(
    users: Histories,
    sources: Sequence[CandidateSource],
    recipe: Recipe,
    solver: Solver,
    settings: TwoStageSettings | None = None,
) -> TwoStage:
    """Train a ranker on the sources' candidates, and choose the best variant on validation.

    Args:
        users: all events except the test events; the sources must have been built without each user's last one.
        sources: sources of candidates, with distinct names.
        recipe: recipe of the ranker, such as `viviane.zoo.DIN()`; it reads the columns of `ranking_schema`.
        solver: training settings; patience counts evaluations, one per epoch.
        settings: see `TwoStageSettings`.

    Raises:
        ConfigError: there are too few users to train or validate, or the sources find none of the last items.
    """
    chosen = settings or TwoStageSettings()
    before, item, _ = leave_one_out(users)
    num_items = sources[0].num_items
    order = np.random.default_rng(chosen.seed).permutation(len(item))
    cut = round(chosen.ranking_share * len(order))
    learn, decide = np.sort(order[:cut]), np.sort(order[cut:])
    if not len(learn) or not len(decide):
        raise ConfigError("too few users with two events to train and validate a ranker", value=len(order))
    popular = Popularity.count(before, num_items)
    search = Recommender(list(sources), num_candidates=chosen.num_candidates, fallback=popular)
    model = Model(solver, ranking_schema(sources, num_items, chosen.max_history), name="ranking")
    model.add(recipe)
    model.compile(Adam(), metrics=["auc", "log_loss"])
    both = Recommender(list(sources), model, num_candidates=chosen.num_candidates, fallback=popular)
    check = _ListEvaluation(both, before.take(decide), item[decide], chosen.k)
    rows = _examples(search, before.take(learn), item[learn], chosen)
    held = _examples(search, before.take(decide), item[decide], chosen)
    with tempfile.TemporaryDirectory(prefix="viviane-ranking-") as folder:
        data = write_dataset(Path(folder) / "train", model.schema, [rows])
        valid = write_dataset(Path(folder) / "valid", model.schema, [held])
        model.fit(data, valid, callbacks=[check])
    ways = {source.name: Recommender(source, fallback=popular) for source in sources} | {TWO_STAGES: both}
    found = {name: check.ndcg(way) for name, way in ways.items()}
    best = max(found, key=lambda name: found[name])
    return TwoStage(ways[best], best, found, both)


def _examples(
    search: Recommender, histories: Histories, item: Ids, settings: TwoStageSettings
) -> dict[str, NDArray[Any]]:
    """Return the ranker's rows: each user's item if the sources found it, and negatives, in random order."""
    rng = np.random.default_rng(settings.seed)
    found = search.candidates(histories, settings.num_candidates)
    hit = (found.items == item[:, None]).any(1)
    if not hit.any():
        fix = "use more candidates, or better sources"
        raise ConfigError("the sources find none of the items that users took next", value=len(item), fix=fix)
    kept = np.flatnonzero(hit)
    found = Candidates(found.items[kept], found.scores[kept])
    histories, item = histories.take(kept), item[kept]
    drawn = rng.integers(RESERVED.first, search.num_items, (len(item), settings.random_negatives))
    strange = drop_seen(Candidates(drawn, np.zeros(drawn.shape, dtype=np.float32)), histories).items
    strange = np.where(strange == item[:, None], NO_ITEM, strange)
    count = found.items.shape[1]
    items = np.concatenate([found.items, strange], 1)
    values = features(search.sources, histories, items, among=count)
    takes = items == item[:, None]
    chance = np.where(takes, -1.0, np.where(items < 0, np.inf, rng.random(items.shape)))
    hard = np.argsort(np.argsort(chance[:, :count], 1), 1) <= settings.hard_negatives  # including the item itself
    kept_places = np.concatenate([hard, np.ones(strange.shape, dtype=bool)], 1) & (items >= 0)
    row, place = np.nonzero(kept_places)
    order = rng.permutation(len(row))
    row, place = row[order], place[order]
    padded = histories.padded(settings.max_history).values.reshape(len(item), -1)
    return {
        "history": list(padded[row].astype(np.int32)),
        "item": items[row, place].astype(np.int32),
        "taken": takes[row, place].astype(np.float32),
        **{name: one[row, place] for name, one in values.items()},
    }


class _ListEvaluation(Callback):
    """NDCG of a recommender's lists over the complete catalogue, the lead metric of the ranker's training."""

    def __init__(self, recommender: Recommender, histories: Histories, item: Ids, k: int) -> None:
        self.recommender, self.histories, self.k = recommender, histories, k
        self.wanted = Histories(item, np.arange(len(item) + 1, dtype=np.int64))
        self.measures = (f"{CATALOGUE}/ndcg@{k}",)
        assert recommender.ranker is not None
        self._items = recommender.candidates(histories, recommender.num_candidates).items
        self._held = self._items >= 0
        self._columns = recommender.ranker.columns(histories, self._items, self._held)  # equal at each evaluation

    def measure(self, trainer: TrainerBase) -> dict[str, float]:
        """Rank the same candidates again."""
        ranker = self.recommender.ranker
        assert ranker is not None
        ranked = in_order(self._items, ranker.predict(self._columns, self._held))
        return {self.measures[0]: self._of(ranked.first(self.k).items)}

    def ndcg(self, way: Recommender) -> float:
        """Return the NDCG of a recommender."""
        return self._of(way.recommend(self.histories, self.k).items)

    def _of(self, lists: Ids) -> float:
        metrics = CatalogueMetrics(self.recommender.num_items, [self.k])
        metrics.add_lists(lists, self.wanted)
        return metrics.compute()[f"ndcg@{self.k}"]
