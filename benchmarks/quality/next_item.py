"""SASRec, HSTU and two stages beside item neighbours and popularity: the next item, every item a candidate.

Amazon's sets: the last item of a user tests, the one before validates, the rest trains; ranked among all items that the
user has not had, as Zhou et al. 2020 (S3-Rec) do. MovieLens 1M has no times here: a hash chooses each user's test and
validation film (`leave_one_out`), and the order of his others means nothing, so each epoch sees it in another one.

SASRec and HSTU stop when NDCG@10 over the whole catalogue stops to grow on the validation items. The two stages are
`viviane.retrieval.fit_two_stage`: SASRec, item neighbours and popular items find candidates, a DIN ranks them.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leave_one_out
import numpy as np
from raw_data import DATA

import viviane as vv
from viviane.retrieval import (
    CandidateSource,
    CatalogueEvaluation,
    CatalogueMetrics,
    Histories,
    ItemKNN,
    ItemKNNSettings,
    Popularity,
    Recommender,
    TwoStageSettings,
    VectorSource,
    catalogue_metrics,
    fit_two_stage,
)
from viviane.schema import RESERVED, Schema
from viviane.training import Callback

K = 10
UNORDERED = ItemKNNSettings(
    max_gap=None, gap_decay=1, backward=1, popularity_power=0.5, age_decay=1, max_history=1000, num_neighbours=50
)


@dataclass(frozen=True)
class Case:
    """A data set and how the models are trained on it; the settings were chosen on validation items of seed 1.

    Args:
        dropout, hstu_dropout: of layers and embeddings of SASRec and of HSTU.
        every: epochs between evaluations.
        num_valid: users, drawn at random, on whom training is stopped.
        copies: times that each user stands in the training data, his events in another order each time; 1 keeps them.
    """

    name: str
    length: int
    batch_size: int
    dim: int
    dropout: float
    lr: float
    every: int
    copies: int = 1
    num_valid: int = 8192
    neighbours: ItemKNNSettings = field(default_factory=ItemKNNSettings)
    published: float | None = None
    hstu_dropout: float = 0.5


CASES = {  # published: HR@10 of SASRec in Zhou et al. 2020, table 2, the same split and ranking
    "amazon_seq Beauty, next item": Case("Beauty", 20, 512, 128, 0.3, 0.002, 2, published=0.0605),
    "amazon_seq Toys, next item": Case("Toys_and_Games", 20, 512, 128, 0.3, 0.002, 2, published=0.0675),
    "amazon_seq Sports, next item": Case("Sports_and_Outdoors", 20, 512, 128, 0.3, 0.002, 2, published=0.0350),
    "ml1m, a film held out by a hash": Case(
        "ml1m", 200, 128, 128, 0.1, 0.001, 1, copies=2, neighbours=UNORDERED, hstu_dropout=0.1
    ),
}


def read(case: Case) -> tuple[Histories, int]:
    """Return each user's items, the validation item second last and the test item last, and the number of ids."""
    if case.name != "ml1m":
        with gzip.open(DATA / "amazon_seq" / f"{case.name}.txt.gz", "rt") as file:
            # Their ids begin at 1, ours at 3.
            users = [np.array(line.split()[1:], dtype=np.int64) + RESERVED.first - 1 for line in file]
        return Histories.of(users), int(max(one.max() for one in users)) + 1
    data = leave_one_out.load()
    order = np.argsort(data.user, kind="stable")
    films = np.split(data.item[order], np.flatnonzero(np.diff(data.user[order])) + 1)
    held = zip(films, data.held["valid"], data.held["test"], strict=True)
    rows = [np.concatenate([one, [valid, test]]) + RESERVED.first for one, valid, test in held]
    return Histories.of(rows), data.seen.shape[1] + RESERVED.first


class _Deadline(Callback):
    """Ends a training in good time; the best weights so far are taken."""

    reason = "time"

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def on_evaluate_end(self, step: int, metrics: dict[str, float]) -> bool:
        return time.monotonic() > self.end


def _schema(num_items: int, length: int) -> Schema:
    history = {"name": "history", "kind": "sequence", "max_length": length, "hotness": length, "vocabulary": "item"}
    return Schema(
        labels=[{"name": "taken"}],
        categorical=[{"num_ids": num_items, **history}, {"name": "item", "num_ids": num_items}],
    )


def _rows(users: Histories, length: int) -> dict[str, Any]:
    before, item = users.before_last(1), users.values[users.offsets[1:] - 1]
    padded = before.padded(length).values.reshape(len(users), length).astype(np.int32)
    return {"history": list(padded), "item": item.astype(np.int32), "taken": np.ones(len(item), dtype=np.float32)}


def train(
    kind: str, case: Case, users: Histories, num_items: int, seed: int, device: str, seconds: float = 3600,
    **options: Any,
) -> tuple[vv.Model, vv.History]:  # fmt: skip
    """Train SASRec or HSTU on all but the last two events of each user.

    Args:
        seconds: when to end at the next evaluation.
        options: of the model, instead of the case's.
    """
    rng = np.random.default_rng(seed)
    known = users.before_last(2)
    known = known.take(np.flatnonzero(known.lengths > 1))
    if case.copies > 1:
        known = Histories.of([rng.permutation(one) for _ in range(case.copies) for one in known])
    valid = users.before_last(1)
    valid = valid.take(np.sort(rng.permutation(len(valid))[: case.num_valid]))
    before, item = valid.before_last(1), valid.values[valid.offsets[1:] - 1]
    steps = max(len(known) // case.batch_size, 1)
    solver = vv.Solver(
        batch_size=case.batch_size, lr=case.lr, warmup_steps=100, epochs=200, eval_every=case.every * steps, patience=3,
        restore_best=True, drop_last=True, seed=seed, device=device, precision="tf32" if device != "cpu" else "fp32",
        num_threads=1 if device == "cpu" else None,
    )  # fmt: skip
    model = vv.Model(solver, _schema(num_items, case.length), name=kind.lower())
    dropout = case.hstu_dropout if kind == "HSTU" else case.dropout
    given = {"dim": case.dim, "dropout": dropout, "embedding_dropout": dropout}
    model.add(getattr(vv.zoo, kind)(init={"type": "normal", "std": 0.02}, **given | options))
    model.compile(vv.Adam(), metrics=["log_loss"])
    check = CatalogueEvaluation(model, before, item, k=[K])
    with tempfile.TemporaryDirectory() as folder:
        data = vv.write_dataset(Path(folder) / "train", model.schema, [_rows(known, case.length)])
        few = vv.write_dataset(Path(folder) / "valid", model.schema, [_rows(valid.take(slice(512)), case.length)])
        history = model.fit(data, few, callbacks=[check, _Deadline(seconds)])
    return model, history


class _Figures(dict[str, float]):
    """Test figures by way, of one data set and seed."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.name, self.seed = name, seed
        self.case = CASES[name]
        self.users, self.num_items = read(self.case)
        self.known = self.users.before_last(2)
        self.before = self.users.before_last(1)
        self.wanted = Histories.of(self.users.values[self.users.offsets[1:] - 1][:, None])

    def keep(self, way: str, metrics: dict[str, float]) -> None:
        for metric, short in (("HR@10", "hr"), ("NDCG@10", "ndcg"), ("coverage@10", "coverage")):
            self[f"{metric}, {way}"] = metrics[f"{short}@{K}"]
        print(f"{self.name}, seed {self.seed}, {way}: {metrics}", flush=True)

    def trained(self, kind: str, device: str, seconds: float = 3600) -> vv.Model:
        """Train SASRec or HSTU, and keep its figures."""
        model, history = train(kind, self.case, self.users, self.num_items, self.seed, device, seconds)
        best = history.best_row("catalogue/ndcg@10")
        self[f"validation NDCG@10, {kind}"] = best["catalogue/ndcg@10"]
        self[f"epochs, {kind}"] = best["epoch"]
        self.keep(kind, catalogue_metrics(model, self.before, self.wanted, seen=self.before, k=[K]))
        return model

    def lists(self, way: str, recommender: Recommender) -> None:
        metrics = CatalogueMetrics(self.num_items, [K])
        metrics.add_lists(recommender.recommend(self.before, K).items, self.wanted)
        self.keep(way, metrics.compute())

    def two_stages(self, sources: list[CandidateSource], device: str) -> None:
        """Rank what the sources find by a DIN, and keep what validation chooses beside it."""
        solver = vv.Solver(
            batch_size=1024, lr=0.001, epochs=12, patience=2, restore_best=True, drop_last=True, seed=self.seed,
            device=device, num_threads=1 if device == "cpu" else None,
        )  # fmt: skip
        recipe = vv.zoo.DIN(
            dim=16, attention_mlp=[16], top_mlp=[64, 32], activation="relu", dropout=0.2, embedding_dropout=0.2,
            init={"type": "normal", "std": 0.03},
        )  # fmt: skip
        both = fit_two_stage(self.before, sources, recipe, solver, TwoStageSettings(seed=self.seed))
        for way, value in both.validation.items():
            self[f"deciding NDCG@10, {way}"] = value
        self["two stages chosen"] = float(both.chosen == "two stages")
        self.lists("two stages", both.both)
        self.lists("the chosen way", both.recommender)

    def simple_sources(self) -> list[CandidateSource]:
        """Return item neighbours and popular items, and keep their figures."""
        knn = ItemKNN.count(self.known, self.num_items, self.case.neighbours)
        popular = Popularity.count(self.known, self.num_items)
        self.lists("item neighbours", Recommender(knn, fallback=popular))
        self.lists("popularity", Recommender(popular))
        return [knn, popular]


def neighbour_figures(name: str, seed: int, device: str) -> dict[str, float]:
    """Two stages without SASRec, which a CPU does in minutes: item neighbours and popular items, ranked by a DIN."""
    found = _Figures(name, seed)
    found.two_stages(found.simple_sources(), device)
    return dict(found)


def hstu_figures(name: str, seed: int, device: str) -> dict[str, float]:
    """HSTU beside item neighbours, without the other models."""
    found = _Figures(name, seed)
    found.trained("HSTU", device)
    found.simple_sources()
    return dict(found)


def figures(name: str, seed: int, device: str, seconds: float = 3600) -> dict[str, float]:
    """Train everything with one seed, and return the test figures by way.

    Args:
        seconds: when each of the trainings of SASRec and HSTU ends at its next evaluation, at the latest.
    """
    found = _Figures(name, seed)
    sasrec, _ = (found.trained(kind, device, seconds) for kind in ("SASRec", "HSTU"))
    found.two_stages([VectorSource(sasrec, name="sasrec"), *found.simple_sources()], device)
    return dict(found)
