"""A recommender as a server asks it: rows as logged, or of ids, to items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from viviane.cli.recommend import given_columns, item_values, open_recommender
from viviane.retrieval.rows import Roles
from viviane.schema import RESERVED
from viviane.serving.columns import ColumnSpec, encoded_columns, raw_columns
from viviane.serving.encoding import RowEncoder
from viviane.serving.errors import RowsError


class ServedRecommender:
    """Retrieval and ranking behind one call; rows go through the ETL of the model that has them, if any.

    Args:
        path: a saved recommender.
        device: of its models.
    """

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        self._recommender, self._model = open_recommender(Path(path), device=device)
        schema, etl = self._model.schema, None
        roles = Roles.of(schema)
        if self._model.etl is not None:
            from viviane.etl import FittedEtl

            etl = FittedEtl.load(self._model.etl)
        self._values = item_values(self._model)
        self._encoder = RowEncoder(schema, etl, frozenset())
        self._raw = etl is not None
        source = roles.item
        if etl is not None:
            (spec,) = (one for one in etl.config.categorical if one.name == roles.item)
            (source,) = spec.sources
        self._absent = {source: None if self._raw else 0}
        """The item column is the answer: rows need not have it."""
        self._history = None if self._raw or roles.history is None else roles.history
        self._length = None if self._history is None else schema.categorical_column(self._history).hotness

    @property
    def inputs(self) -> tuple[ColumnSpec, ...]:
        """The columns of rows."""
        found = raw_columns(self._encoder.raw_columns) if self._raw else encoded_columns(self._model.schema)
        return tuple(one for one in found if one.name not in self._absent)

    @property
    def has_values(self) -> bool:
        """Whether answers hold the raw values of items."""
        return self._values is not None

    def columns(self) -> dict[str, Any]:
        """Describe the columns of rows, as plain data."""
        inputs = [one.to_dict() for one in self.inputs]
        return {"raw": self._raw, "inputs": inputs, "num_items": self._recommender.num_items}

    def _whole(self, row: Any) -> dict[str, Any]:
        """A row with the item column, and with a history of the one length that the model's data has."""
        whole = {**row, **{name: value for name, value in self._absent.items() if name not in row}}
        if self._history is not None and self._length is not None and isinstance(whole.get(self._history), list):
            newest = whole[self._history][-self._length :]
            whole[self._history] = [*newest, *[RESERVED.padding] * (self._length - len(newest))]
        return whole

    def recommend(self, rows: list[Any], k: int, *, keep_seen: bool) -> list[dict[str, Any]]:
        """Return items, scores and, where the ETL has them, the items' values of each row.

        Raises:
            RowsError: a row cannot be used; names row, column and value.
        """
        if not rows:
            return []
        batch, problems = self._encoder.encode([self._whole(row) for row in rows], raw=self._raw)
        if problems:
            raise RowsError.of(problems)
        histories, columns = given_columns(self._model, batch)
        found = self._recommender.recommend(histories, k, rows=columns, remove_seen=not keep_seen)
        answers = []
        for items, scores in zip(found.items, found.scores, strict=True):
            there = np.flatnonzero(items >= 0)
            answer: dict[str, Any] = {"items": items[there].tolist(), "scores": scores[there].tolist()}
            if self._values is not None:
                answer["values"] = [self._values.get(item) for item in answer["items"]]
            answers.append(answer)
        return answers
