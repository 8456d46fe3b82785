"""Rows of a request, in whatever form they come, as columns by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from viviane.core.errors import ConfigError, SchemaError, suggest
from viviane.core.rows import as_table, is_table
from viviane.core.tensors import check_tensor
from viviane.serving.errors import RowProblem

FORMS = "columns by name, a list of dicts, an Arrow, pandas, Polars or Hugging Face table, or (encoded) a Batch"


def columns_of(rows: Any, wanted: Sequence[str]) -> tuple[dict[str, Any], int, list[RowProblem]]:
    """Return the wanted columns, how many rows there are, and the rows that lack a column.

    Other columns are left out; what is wrong with a column's values is found when they are converted.

    Args:
        rows: see `FORMS`.
        wanted: names of columns.

    Raises:
        SchemaError: a column is missing or occurs twice, or columns differ in length.
        ConfigError: rows of another kind.

    Example:
        >>> columns_of([{"a": 1, "b": 2}, {"a": 3}], ["a"])
        ({'a': [1, 3]}, 2, [])
    """
    if isinstance(rows, Mapping):
        return *_checked({name: rows[name] for name in _present(rows.keys(), wanted)}), []
    if isinstance(rows, list | tuple):
        return _from_dicts(rows, wanted)
    table = _arrow(rows)
    if table is not None:
        names = table.schema.names
        for name in _present(names, wanted):
            if names.count(name) > 1:
                raise SchemaError("a column occurs twice", where="the request", value=name, fix="rename one of them")
        return {name: table.column(name) for name in wanted}, table.num_rows, []
    if hasattr(rows, "columns") and hasattr(rows, "__getitem__"):  # a pandas frame: columns one by one, since
        return _from_frame(rows, wanted)  # values of mixed types keep it from being converted as a whole
    raise ConfigError("rows of this kind cannot be predicted", value=type(rows).__name__, allowed=FORMS)


def _from_dicts(rows: Sequence[Any], wanted: Sequence[str]) -> tuple[dict[str, list[Any]], int, list[RowProblem]]:
    problems = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            problems.append(RowProblem(number, "", type(row).__name__, "a row is a dict from column to value"))
            continue
        for name in wanted:
            if name not in row:
                hint = f"the row has {', '.join(repr(key) for key in [*row][:5])}"[:200] if row else "the row is empty"
                problem = f"the column is missing (None is a missing value); {hint}"
                problems.append(RowProblem(number, name, "", problem))
                break
    refused = {problem.row for problem in problems}
    if not refused:
        return {name: [row[name] for row in rows] for name in wanted}, len(rows), []
    columns = {name: [None if number in refused else row[name] for number, row in enumerate(rows)] for name in wanted}
    return columns, len(rows), problems


def _from_frame(rows: Any, wanted: Sequence[str]) -> tuple[dict[str, Any], int, list[RowProblem]]:
    names = [str(name) for name in rows.columns]
    for name in _present(names, wanted):
        if names.count(name) > 1:
            raise SchemaError("a column occurs twice", where="the request", value=name, fix="rename one of them")
    return {name: rows[name] for name in wanted}, len(rows), []


def _arrow(rows: Any) -> pa.Table | None:
    """Return an Arrow table, or what gives one without loss; None of other things, and of pandas frames."""
    if isinstance(rows, pa.Table):
        return rows
    return as_table(rows) if isinstance(rows, pa.RecordBatch) or (is_table(rows) and not _is_pandas(rows)) else None


def _is_pandas(rows: Any) -> bool:
    return type(rows).__module__.startswith("pandas")


def _present(names: Any, wanted: Sequence[str]) -> Sequence[str]:
    for name in wanted:
        if name not in names:
            fix = suggest(name, [str(one) for one in names]) if len(names) else None
            raise SchemaError("a column is missing", where="the request", value=name, fix=fix)
    return wanted


def _checked(columns: dict[str, Any]) -> tuple[dict[str, Any], int]:
    lengths = {}
    for name, values in columns.items():
        if isinstance(values, torch.Tensor):
            check_tensor(values, f"column {name!r}")
        try:
            has_rows = not isinstance(values, str | bytes | Mapping) and np.ndim(_shape_only(values)) != 0
            lengths[name] = len(values)
        except TypeError:
            has_rows = False
        if not has_rows:
            fix = "for one row give a list of one dict, or columns with one value each"
            raise SchemaError(
                "a column is an array or a list", where=f"column {name!r}", value=repr(values)[:80], fix=fix
            )
    if len(set(lengths.values())) > 1:
        raise SchemaError("columns differ in length", where="the request", value=lengths)
    return columns, next(iter(lengths.values()), 0)


def _shape_only(values: Any) -> Any:
    """Return something with the number of dimensions that values have, without converting a list's content."""
    return values if isinstance(values, np.ndarray | torch.Tensor) else [None]
