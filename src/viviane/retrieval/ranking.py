"""The second stage: a model of the history, the candidate and the sources' scores of the candidate.

Dense columns of the ranking model with these names are computed for each candidate from the scores s of a source for
the candidates of a row:

    <source>_score      (s - mean) / deviation over the row's candidates, 0 if all are equal
    <source>_level      asinh(s)
    <source>_rank       log(1 + candidates with a higher score)
    history_length      log(1 + items in the history)

All other columns, such as the user's age, come from the rows of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import SchemaError
from viviane.core.locks import ThreadLock
from viviane.model import Model
from viviane.model.prediction import predict_rows
from viviane.retrieval.candidates import Candidates, CandidateSource, in_order
from viviane.retrieval.histories import Histories, Ids
from viviane.retrieval.rows import Roles, batches
from viviane.schema import Schema

_ROWS = 16384  # rows per batch
HISTORY_LENGTH = "history_length"
KINDS = ("score", "level", "rank")


def feature_names(sources: Sequence[CandidateSource]) -> list[str]:
    """Return the names of the columns that can be computed.

    Example:
        >>> from viviane.retrieval import Popularity
        >>> feature_names([Popularity(np.ones(5))])
        ['popularity_score', 'popularity_level', 'popularity_rank', 'history_length']
    """
    return [*(f"{source.name}_{kind}" for source in sources for kind in KINDS), HISTORY_LENGTH]


def features(
    sources: Sequence[CandidateSource], histories: Histories, items: Ids, rows: Any = None, *, among: int | None = None
) -> dict[str, NDArray[np.float32]]:
    """Compute the columns for candidates, (B, K) each; see the module docstring.

    Args:
        among: the first `among` items are a row's candidates; the others are compared with these.
    """
    held = items >= 0
    base = held & (np.arange(items.shape[1]) < (items.shape[1] if among is None else among))
    count = base.sum(1, keepdims=True).clip(1)
    found: dict[str, NDArray[np.float32]] = {}
    for source in sources:
        scores = np.where(held, source.score(histories, items, rows), 0.0).astype(np.float64)
        mean = np.where(base, scores, 0.0).sum(1, keepdims=True) / count
        spread = np.sqrt((np.where(base, scores - mean, 0.0) ** 2).sum(1, keepdims=True) / count)
        standard = np.where(spread > 1e-12, (scores - mean) / np.maximum(spread, 1e-12), 0.0)
        order = np.sort(np.where(base, -scores, np.inf), 1)
        higher = np.zeros(items.shape)
        for row, (one, own) in enumerate(zip(order, scores, strict=True)):
            higher[row] = np.searchsorted(one, -own)
        values = (standard, np.arcsinh(scores), np.log1p(higher))
        found |= {f"{source.name}_{kind}": one.astype(np.float32) for kind, one in zip(KINDS, values, strict=True)}
    length = np.log1p(histories.lengths.astype(np.float32))
    found[HISTORY_LENGTH] = np.broadcast_to(length[:, None], items.shape).astype(np.float32)
    return found


class Ranker:
    """Orders candidates by a model's probability.

    Args:
        model: reads an item, and optionally a history, columns of the rows, and the columns above.
        sources: sources from which the columns are computed.
        label: label to rank by; None: the first.

    Raises:
        SchemaError: the model has no such label or no item column.
    """

    def __init__(self, model: Model, sources: Sequence[CandidateSource], label: str | None = None) -> None:
        self.model = model
        self.sources = list(sources)
        self.roles = Roles.of(model.schema)
        names = [one.name for one in model.schema.labels]
        if label is not None and label not in names:
            raise SchemaError("unknown label of the ranking model", value=label, allowed=", ".join(names))
        self.label = 0 if label is None else names.index(label)
        self._lock = ThreadLock()

    def scores(self, histories: Histories, items: Ids, rows: Any = None) -> NDArray[np.float32]:
        """Return the probability of each candidate, (B, K), minus infinity for none."""
        held = items >= 0
        if not held.any():
            return np.full(items.shape, -np.inf, dtype=np.float32)
        return self.predict(self.columns(histories, items, held, rows), held)

    def predict(self, columns: Mapping[str, Any], held: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the probabilities for the result of `columns`, (B, K), minus infinity where `held` is False."""
        found = np.full(held.shape, -np.inf, dtype=np.float32)
        rows = batches(_features(self.model.schema), int(held.sum()), columns, _ROWS)
        with self._lock:  # eval mode applies to the complete module
            parts = list(predict_rows(self.model.trainer, rows))
        found[held] = np.concatenate(parts)[:, self.label]
        return found

    def rank(self, histories: Histories, items: Ids, rows: Any = None) -> Candidates:
        """Return the candidates by descending probability."""
        return in_order(items, self.scores(histories, items, rows))

    def columns(self, histories: Histories, items: Ids, held: NDArray[np.bool_], rows: Any = None) -> dict[str, Any]:
        """Return the model's columns for the candidates where `held` is True, one row each.

        Raises:
            SchemaError: a dense column is neither given nor computable.
        """
        wanted = {column.name for column in self.model.schema.dense}
        computed = features(self.sources, histories, items, rows) if wanted else {}
        row = np.nonzero(held)[0]
        columns: dict[str, Any] = {self.roles.item: items[held]}
        if self.roles.history is not None:
            columns[self.roles.history] = histories.take(row)
        given: Mapping[str, Any] = rows or {}
        for name in self.model.schema.column_names:
            if name in given and name not in columns:
                values = given[name]
                columns[name] = values.take(row) if isinstance(values, Histories) else np.asarray(values)[row]
            elif name in computed:
                columns[name] = computed[name][held]
        missing = sorted(wanted - columns.keys())
        if missing:
            allowed = ", ".join(feature_names(self.sources))
            raise SchemaError("a column of the ranking model is missing", value=missing[0], allowed=allowed,
                              fix="pass it with the histories, or train the model without it")  # fmt: skip
        return columns


def _features(schema: Schema) -> Schema:
    """Return the schema without labels."""
    labels = {label.name for label in schema.labels}
    return schema.select([name for name in schema.column_names if name not in labels])
