"""Rows of a request to a batch: by the model's own ETL where they are raw, checked where they are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from viviane.batch import Batch, Layout
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.etl import FittedEtl
from viviane.etl.columns import InputColumn
from viviane.model.prediction import batch_of_table
from viviane.schema import Schema
from viviane.serving.batches import ids_as, joined, padding_batch, spread
from viviane.serving.encoded_rows import ORIGIN, encoded_batch
from viviane.serving.errors import RowProblem
from viviane.serving.matrices import columns_of_matrices
from viviane.serving.plain_rows import plain_rows
from viviane.serving.raw_rows import raw_table
from viviane.serving.typed_columns import TypedColumns


class RowEncoder:
    """Turns requests into batches.

    Args:
        schema: the columns of the model.
        etl: its fitted ETL, or None.
        strict_ids: categorical columns whose ids have to be in range.
        matrices: encoded rows have their dense numbers and one-hot ids in a matrix each.
    """

    def __init__(
        self, schema: Schema, etl: FittedEtl | None, strict_ids: frozenset[str], *, matrices: bool = False
    ) -> None:
        self.schema, self._strict_ids, self._matrices = schema, strict_ids, matrices
        self._etl = None if etl is None else etl.for_prediction()
        self._plain = None if self._etl is None else plain_rows(self._etl, schema, ORIGIN)
        self._typed = TypedColumns.of(schema, strict_ids, ORIGIN, matrices=matrices)
        self._layout = self._seen_layout = Layout.of(schema)
        empty = padding_batch(schema, 0)
        self._id_type, self._widths = empty.one_hot.dtype, (empty.dense.shape[1], empty.one_hot.shape[1])
        self._bag_types = {name: bag.values.dtype for name, bag in empty.bags.items()}

    @property
    def has_etl(self) -> bool:
        """Whether it takes raw rows."""
        return self._etl is not None

    @property
    def rows_are_independent(self) -> bool:
        """Whether the result of a raw row depends on that row alone."""
        return self._etl is None or self._etl.rows_are_independent

    @property
    def raw_columns(self) -> tuple[InputColumn, ...]:
        """The raw columns that features need.

        Raises:
            ConfigError: the model has no ETL.
        """
        config = self.etl.config
        needed = set(config.feature_sources)
        return tuple(column for column in config.input.columns if column.name in needed)

    @property
    def etl(self) -> FittedEtl:
        """The fitted ETL, without labels.

        Raises:
            ConfigError: the model has none.
        """
        if self._etl is None:
            raise ConfigError(
                "the model has no ETL, so it cannot read raw rows",
                fix="train it on a data set that `viviane etl` wrote, or predict encoded rows",
            )
        return self._etl

    def encode(self, rows: Any, *, raw: bool) -> tuple[Batch, list[RowProblem]]:
        """Return the rows of a request as a batch, and the first problem of each row that cannot be used.

        Refused rows are padding in the batch, so that every row keeps its place.

        Raises:
            SchemaError, DataError: a column is missing or of another type or shape.
            KeyRangeError: an id of a `Batch` does not fit its column's type.
            ConfigError: raw rows and no ETL, or rows of an unknown kind.
        """
        if isinstance(rows, Batch):
            if rows.layout is not self._seen_layout:
                self._check_layout(rows.layout)
            return self._as_the_schema_says(rows), []
        if not raw:
            typed = None if self._typed is None else self._typed.batch(rows)
            if typed is not None:
                return typed, []
            rows = columns_of_matrices(rows, self.schema) if self._matrices else rows
            batch, problems = encoded_batch(rows, self.schema, self._strict_ids)
            return batch, _first_of_each(problems)
        quick = None if self._plain is None else self._plain.encode(rows)
        if quick is not None:
            return quick, []
        table, problems = raw_table(rows, self.raw_columns, self.etl.config.input.missing)
        return self._encode_raw(table, problems)

    def _check_layout(self, layout: Layout) -> None:
        if layout != self._layout:
            what = "the batch has other columns than the model"
            raise SchemaError(what, value=str(layout), allowed=str(self._layout))
        self._seen_layout = layout  # the batches of a caller share theirs: comparing names would take microseconds

    def _as_the_schema_says(self, batch: Batch) -> Batch:
        """Return a caller's batch with ids of the schema's types; programs and graphs read them by their address."""
        dense, one_hot = batch.dense, batch.one_hot
        shapes = tuple((batch.size, width) for width in self._widths)
        if (dense.shape, one_hot.shape) != shapes or dense.dtype != torch.float32:
            given = f"dense {tuple(dense.shape)} {dense.dtype}, one_hot {tuple(one_hot.shape)}"
            allowed = f"dense {shapes[0]} torch.float32, one_hot {shapes[1]}"
            raise DataError("the batch has other shapes or types than the model", value=given, allowed=allowed)
        if one_hot.dtype != self._id_type:
            batch = replace(batch, one_hot=ids_as(one_hot, self._id_type, "one_hot"))
        for name, dtype in self._bag_types.items():
            bag = batch.bags[name]
            if bag.values.dtype != dtype:
                bag = replace(bag, values=ids_as(bag.values, dtype, f"bag {name!r}"))
                batch = replace(batch, bags={**batch.bags, name: bag})
        return batch

    def _encode_raw(self, table: pa.Table, problems: list[RowProblem]) -> tuple[Batch, list[RowProblem]]:
        typed, cells = self.etl.read(table)
        refused = _first_of_each([*problems, *(RowProblem.of(c.row, c.column, c.value, c.problem) for c in cells)])
        kept = _others(typed.num_rows, refused)
        batch, more = self._apply(typed.take(pa.array(kept)) if refused else typed)
        if more:
            refused = _first_of_each([*refused, *(replace(one, row=int(kept[one.row])) for one in more)])
        if refused:
            batch = spread(batch, _others(typed.num_rows, refused), typed.num_rows, self.schema)
        return batch, refused

    def _apply(self, typed: pa.Table) -> tuple[Batch, list[RowProblem]]:
        """Apply the ETL; where it refuses what it computed from a row, find such rows by halving.

        Returns:
            The other rows, and the problems, whose rows are counted in `typed`.
        """
        if not typed.num_rows:
            return padding_batch(self.schema, 0), []
        try:
            return batch_of_table(self.etl.apply(typed), self.schema, ORIGIN), []
        except DataError as error:
            if not self.etl.rows_are_independent:
                raise
            if typed.num_rows == 1:
                return padding_batch(self.schema, 0), [self._computed_problem(error, typed)]
        half = typed.num_rows // 2
        left, wrong = self._apply(typed.slice(0, half))
        right, more = self._apply(typed.slice(half))
        return joined([left, right]), wrong + [replace(one, row=one.row + half) for one in more]

    def _computed_problem(self, error: DataError, typed: pa.Table) -> RowProblem:
        """Return which raw value of a single row the ETL could not use, if its error names the column."""
        config = self.etl.config
        for spec in config.dense:
            source = spec.source or spec.name
            if error.where == f"column {spec.name!r}" and source in typed.column_names:
                return RowProblem.of(0, source, typed.column(source)[0].as_py(), error.what)
        return RowProblem.of(0, "", "" if error.value is None else error.value, error.what)


def _first_of_each(problems: Sequence[RowProblem]) -> list[RowProblem]:
    """Return the first problem of each row, in order of rows."""
    first: dict[int, RowProblem] = {}
    for problem in problems:
        first.setdefault(problem.row, problem)
    return [first[row] for row in sorted(first)]


def _others(size: int, problems: Sequence[RowProblem]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of the rows without problems."""
    mask = np.ones(size, np.bool_)
    mask[[problem.row for problem in problems]] = False
    return np.flatnonzero(mask)
