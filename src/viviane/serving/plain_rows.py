"""Raw rows of small requests to a batch in Python, column by column, with the bits of the model's ETL.

The ETL runs queries and hashes its vocabularies for each table, which takes milliseconds whatever the number of
rows. Here each column is a function that was made once. What a request may hold is narrow: ordinary numbers and texts
in columns that are neither derived nor crossed. Anything else, malformed values above all, is left to the ETL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from viviane.batch import Bag, Batch, Layout
from viviane.etl import FittedEtl
from viviane.schema import Schema
from viviane.serving.plain_columns import LeftToTheEtlError, dense_column, ids_column, lists_column
from viviane.serving.vocabularies import Find

MOST_ROWS: Final = 512
"""Rows up to which this is quicker than the ETL."""


class PlainRows:
    """Encodes requests of up to `MOST_ROWS` raw rows.

    Args:
        etl: fitted, without labels.
        schema: of the model.

    Raises:
        LeftToTheEtlError: the ETL has columns of a kind that is not made here; `plain_rows` gives None then.
    """

    def __init__(self, etl: FittedEtl, schema: Schema, origin: str) -> None:
        config = etl.config
        if config.derived or config.sample_weight is not None or any(c.weights for c in schema.categorical):
            raise LeftToTheEtlError
        missing = frozenset(config.input.missing)
        self._layout, self._origin = Layout.of(schema), origin
        self._id_type: Any = np.int64 if any(column.dtype == "int64" for column in schema.one_hot) else np.int32
        dense = {spec.name: spec for spec in config.dense}
        ids = {spec.name: spec for spec in config.categorical}
        indexes: dict[str, Find] = {}
        self._numbers = [dense_column(etl, dense[column.name]) for column in schema.dense]
        self._singles = [ids_column(etl, ids[column.name], missing, indexes) for column in schema.one_hot]
        self._bags = [
            (column.name, np.int64 if column.dtype == "int64" else np.int32,
             *lists_column(etl, ids[column.name], missing, indexes))
            for column in schema.bags
        ]  # fmt: skip
        self.columns = tuple(dict.fromkeys([one[0] for one in (*self._numbers, *self._singles)] + [
            one[2] for one in self._bags
        ]))  # fmt: skip

    def encode(self, rows: Any) -> Batch | None:
        """Return rows as a batch, or None where they are to be given to the ETL.

        Args:
            rows: columns by name (lists, tuples or arrays), or a list of dicts; others are given to the ETL.
        """
        try:
            columns, size = self._columns_of(rows)
            return self._batch(columns, size)
        except (LeftToTheEtlError, OverflowError, UnicodeEncodeError):
            return None

    def _columns_of(self, rows: Any) -> tuple[dict[str, Sequence[Any]], int]:
        if isinstance(rows, list):
            if not 0 < len(rows) <= MOST_ROWS or {*map(type, rows)} != {dict}:
                raise LeftToTheEtlError
            try:
                if len(self.columns) == 1:
                    return {self.columns[0]: [row[self.columns[0]] for row in rows]}, len(rows)
                by_row = map(itemgetter(*self.columns), rows)
                return dict(zip(self.columns, zip(*by_row, strict=True), strict=True)), len(rows)
            except KeyError:
                raise LeftToTheEtlError from None
        if isinstance(rows, pa.Table | pa.RecordBatch):
            return self._columns_of_arrow(rows)
        if not isinstance(rows, Mapping):
            raise LeftToTheEtlError
        found: dict[str, Sequence[Any]] = {}
        sizes = set()
        for name in self.columns:
            values = rows.get(name)
            if isinstance(values, np.ndarray) and values.ndim == 1 and len(values) <= MOST_ROWS:
                values = values.tolist()
            if not isinstance(values, list | tuple):
                raise LeftToTheEtlError
            found[name] = values
            sizes.add(len(values))
        if len(sizes) != 1 or not 0 < max(sizes) <= MOST_ROWS:
            raise LeftToTheEtlError
        return found, sizes.pop()

    def _columns_of_arrow(self, rows: pa.Table | pa.RecordBatch) -> tuple[dict[str, Sequence[Any]], int]:
        names = rows.schema.names
        if not 0 < rows.num_rows <= MOST_ROWS or any(names.count(name) != 1 for name in self.columns):
            raise LeftToTheEtlError
        return {name: rows.column(name).to_pylist() for name in self.columns}, rows.num_rows

    def _batch(self, columns: dict[str, Sequence[Any]], size: int) -> Batch:
        dense = np.empty((size, len(self._numbers)), np.float32)
        for place, (name, make) in enumerate(self._numbers):
            dense[:, place] = make(columns[name])
        one_hot = np.empty((size, len(self._singles)), self._id_type)
        for place, (name, ids) in enumerate(self._singles):
            one_hot[:, place] = ids(columns[name])
        bags = {}
        for name, dtype, source, lists in self._bags:
            rows = [lists(value) for value in columns[source]]
            offsets = np.zeros(size + 1, np.int64)
            np.cumsum([len(row) for row in rows], out=offsets[1:])
            flat = np.array([one for row in rows for one in row], dtype)
            bags[name] = Bag(torch.from_numpy(flat), torch.from_numpy(offsets))
        return Batch(
            self._layout, torch.zeros(size, 0), torch.from_numpy(dense), torch.from_numpy(one_hot), bags,
            origin=self._origin,
        )  # fmt: skip


def plain_rows(etl: FittedEtl, schema: Schema, origin: str) -> PlainRows | None:
    """Return the encoder of small requests, or None where the ETL has columns of another kind."""
    try:
        return PlainRows(etl, schema, origin)
    except LeftToTheEtlError:
        return None
