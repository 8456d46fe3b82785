"""Recommendations in two stages: sources find candidates, a second model ranks them.

recommender/
    recommender.json        settings, sources, checksums
    retrieval-<name>/       a model with its index; or the arrays of item neighbours or popularity
    ranking/                the second model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, SchemaError
from viviane.core.locations import AnyPath
from viviane.core.whole_numbers import whole_numbers
from viviane.model import Model
from viviane.retrieval.candidates import NO_ITEM, Candidates, CandidateSource, check_count, drop_seen, in_order
from viviane.retrieval.histories import Histories, Ids
from viviane.retrieval.popularity import Popularity
from viviane.retrieval.ranking import Ranker
from viviane.retrieval.saving import load_parts, save_recommender
from viviane.retrieval.vector_source import VectorSource
from viviane.schema import RESERVED


@dataclass(frozen=True)
class Recommendations:
    """Recommended items for each row, best first.

    Args:
        items: (B, k), -1 if there are fewer than k.
        scores: (B, k), NaN for -1: the second model's probability, or the source's score without one.
    """

    items: Ids
    scores: NDArray[np.float32]


class Recommender:
    """Finds and ranks items for histories; thread-safe, and one folder on disk.

    A row for which no source finds candidates, such as one with an empty history, gets popular items if there is a
    fallback. Each row gets at most min(k, number of unseen items) items.

    Args:
        retrieval: sources of candidates, in order of priority; a model becomes an exact search of its nearest items.
        ranking: the second model, see `viviane.retrieval.ranking`; None keeps the order of the first source, followed
            by the candidates of the others.
        num_candidates: number of candidates per source.
        fallback: fills rows for which the sources find too few items.
        label: label of the ranking model; None: the first.

    Example:
        >>> from viviane.retrieval import ItemKNN
        >>> bought = Histories.of([[3, 4, 5], [4, 5], [3, 5]])
        >>> recommender = Recommender(ItemKNN.count(bought, 7), fallback=Popularity.count(bought, 7))
        >>> recommender.recommend([[3], []], k=2).items.tolist()
        [[5, 4], [5, 3]]
    """

    def __init__(
        self,
        retrieval: CandidateSource | Model | Sequence[CandidateSource | Model],
        ranking: Model | None = None,
        *,
        num_candidates: int = 100,
        fallback: Popularity | None = None,
        label: str | None = None,
    ) -> None:
        given = list(retrieval) if isinstance(retrieval, Sequence) else [retrieval]
        self.sources: list[CandidateSource] = [VectorSource(one) if isinstance(one, Model) else one for one in given]
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            fix = "give each a different name: VectorSource(model, name='towers')"
            raise ConfigError("the sources of a recommender must have different names", value=", ".join(names), fix=fix)
        sizes = {source.num_items for source in self.sources}
        if fallback is not None:
            sizes.add(fallback.num_items)
        self.ranker = None if ranking is None else Ranker(ranking, self.sources, label)
        if self.ranker is not None:
            sizes.add(self.ranker.roles.num_items)
        if len(sizes) > 1:
            what = "the stages have catalogues of different sizes, so their item ids may differ"
            raise ConfigError(what, value=", ".join(map(str, sorted(sizes))), fix="train them on data of the same ETL")
        check_count(num_candidates, "candidates", where="num_candidates")
        self.num_items = sizes.pop()
        self.num_candidates = num_candidates
        self.fallback = fallback
        self.label = label

    @property
    def ranking(self) -> Model | None:
        """The second model."""
        return None if self.ranker is None else self.ranker.model

    def recommend(
        self,
        histories: Any,
        k: int = 10,
        *,
        rows: Mapping[str, Any] | None = None,
        exclude: Any = None,
        remove_seen: bool = True,
    ) -> Recommendations:
        """Return the best k items for each history.

        Args:
            histories: lists of item ids, oldest first; ids outside the catalogue are ignored.
            k: number of recommendations.
            rows: additional columns for the models, by name, such as the user's id.
            exclude: additional items to exclude per row, such as older ones that the history omits.
            remove_seen: exclude the history's items.

        Raises:
            ConfigError: k below 1. SchemaError: histories or columns have a wrong form or length.
        """
        asked = Histories.of(histories)
        check_count(k, "recommendations", rows=len(asked))
        known = asked.where((asked.values >= 0) & (asked.values < self.num_items))
        for name, values in (rows or {}).items():
            if len(values) != len(asked):
                allowed = f"{len(asked)}, one per history"
                raise SchemaError("a column has a wrong number of rows", where=name, value=len(values), allowed=allowed)
        unwanted = self._unwanted(known, exclude, remove_seen)
        depth = min(max(self.num_candidates, k), self.num_items)
        found = self.candidates(known, depth, rows)
        if not remove_seen:
            found = self._with_seen(found, known)
        found = drop_seen(found, unwanted)
        if self.ranker is not None:
            found = self.ranker.rank(known, found.items, rows)
        best = found.first(k)
        if self.fallback is not None and (best.items == NO_ITEM).any():
            best = self._filled(best, unwanted, k)
        return Recommendations(best.items, np.where(best.items == NO_ITEM, np.nan, best.scores).astype(np.float32))

    def candidates(self, histories: Histories, depth: int, rows: Any = None) -> Candidates:
        """Return the candidates of all sources, in order of the sources, without duplicates."""
        parts = [source.candidates(histories, depth, rows) for source in self.sources]
        items = np.concatenate([part.items for part in parts], 1)
        scores = np.concatenate([part.scores for part in parts], 1)
        if len(parts) > 1:  # scores of several sources are not comparable: order by source and position
            place = -np.arange(scores.shape[1], dtype=np.float32)
            scores = np.where(items == NO_ITEM, -np.inf, place).astype(np.float32)
        nothing = Histories(np.empty(0, dtype=np.int64), np.zeros(len(histories) + 1, dtype=np.int64))
        return drop_seen(Candidates(items, scores), nothing)

    def similar(self, items: Sequence[int], k: int = 10) -> Recommendations:
        """Return the items nearest to given ones, by the first source that has vectors, otherwise by item neighbours.

        Raises:
            SchemaError: an item is not in the catalogue.
        """
        asked = whole_numbers(items, np.int64, "items")
        check_count(k, "recommendations", rows=asked.size)
        wrong = (asked < RESERVED.first) | (asked >= self.num_items)
        if asked.ndim != 1 or wrong.any():
            value = int(asked[wrong][0]) if wrong.any() else asked.shape
            raise SchemaError(
                "an item is not in the catalogue", value=value, allowed=f"{RESERVED.first} to {self.num_items - 1}"
            )
        own = Histories(asked, np.arange(len(asked) + 1, dtype=np.int64))
        depth = min(k, self.num_items)
        for source in self.sources:
            if isinstance(source, VectorSource):
                found = source.index.search(source.index.vectors_of(asked), depth + 1)
                break
        else:
            found = self.sources[0].candidates(own, depth)
        best = drop_seen(found, own).first(k)
        return Recommendations(best.items, np.where(best.items == NO_ITEM, np.nan, best.scores).astype(np.float32))

    def _unwanted(self, histories: Histories, exclude: Any, remove_seen: bool) -> Histories:
        from viviane.retrieval.histories import together

        parts = [histories.where(np.full(len(histories.values), remove_seen))]
        if exclude is not None:
            more = Histories.of(exclude)
            if len(more) != len(histories):
                raise SchemaError(
                    "there must be one list per history", where="exclude", value=len(more), allowed=str(len(histories))
                )
            parts.append(more)
        return together(parts)

    def _with_seen(self, found: Candidates, histories: Histories) -> Candidates:
        """Sources exclude the history; append its items, newest first, after the other candidates."""
        longest = int(histories.lengths.max(initial=0))
        again = np.full((len(histories), longest), NO_ITEM, dtype=np.int64)
        again[histories.row_of, histories.age] = histories.values
        low = found.scores.min(initial=0.0, where=np.isfinite(found.scores)) - 1.0
        scores = np.where(again == NO_ITEM, -np.inf, low - np.arange(longest)).astype(np.float32)
        return Candidates(np.concatenate([found.items, again], 1), np.concatenate([found.scores, scores], 1))

    def _filled(self, best: Candidates, unwanted: Histories, k: int) -> Candidates:
        """Append popular items after the found ones; their scores continue below the last one."""
        assert self.fallback is not None
        short = np.flatnonzero((best.items == NO_ITEM).any(1))
        had = best.items[short]
        count = min(2 * k, self.num_items)
        popular = self.fallback.candidates(unwanted.take(short), count)
        last = np.where(np.isfinite(best.scores[short]), best.scores[short], np.inf).min(1, keepdims=True)
        below = np.where(np.isfinite(last), last, 0.0) - 1e-6 * (1 + np.arange(count))
        scores = np.concatenate([best.scores[short], np.where(popular.items == NO_ITEM, -np.inf, below)], 1)
        joined = Candidates(np.concatenate([had, popular.items], 1), scores.astype(np.float32))
        nothing = Histories(np.empty(0, dtype=np.int64), np.zeros(len(short) + 1, dtype=np.int64))
        filled = drop_seen(joined, nothing).first(k)
        items, values = best.items.copy(), best.scores.copy()
        items[short], values[short] = filled.items, filled.scores
        return in_order(items, values)

    def save(self, folder: str | AnyPath) -> AnyPath:
        """Write models, indexes and settings to one folder, atomically."""
        return save_recommender(
            folder, self.sources, ranking=self.ranking, fallback=self.fallback, num_candidates=self.num_candidates,
            label=self.label,
        )  # fmt: skip

    @classmethod
    def load(cls, folder: str | AnyPath, *, device: str = "auto") -> Self:
        """Load and verify a saved recommender.

        Raises:
            CheckpointError: a file is missing or altered, or an index belongs to another model.
        """
        return cls(**load_parts(folder, device))
