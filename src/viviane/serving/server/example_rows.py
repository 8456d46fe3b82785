"""Rows that a model accepts, made up from its columns: to try a model, and to load a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from viviane.serving.columns import ColumnSpec

_LIST_LENGTH: Final = 3
_UNBOUNDED_IDS: Final = 1000


def example_rows(columns: Sequence[ColumnSpec], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows as dicts from column to value.

    Raw texts are "a" to "z", so that they are mostly values which the model's ETL never saw.

    Example:
        >>> example_rows([ColumnSpec("item", "int32", (-1,), raw=False, num_ids=9)], 2)
        [{'item': 8}, {'item': 6}]
    """
    draw = np.random.default_rng(seed)
    return [{one.name: _value(one, draw) for one in columns} for _ in range(count)]


def _value(column: ColumnSpec, draw: np.random.Generator) -> Any:
    if column.format == "list":
        # digits, since the elements may be texts as well as numbers
        return (column.separator or "|").join(str(draw.integers(0, 100)) for _ in range(_LIST_LENGTH))
    if len(column.shape) > 1:
        length = column.shape[1] if column.shape[1] >= 0 else _LIST_LENGTH
        return [_scalar(column, draw) for _ in range(length)]
    return _scalar(column, draw)


def _scalar(column: ColumnSpec, draw: np.random.Generator) -> Any:
    if column.format == "hex":
        return f"{draw.integers(0, 2**32):08x}"
    if column.format == "timestamp":
        return f"2024-01-{draw.integers(1, 29):02} {draw.integers(0, 24):02}:00:00"
    if column.dtype == "string":
        return chr(97 + int(draw.integers(0, 26)))
    if column.dtype in ("float32", "float64"):
        return round(float(draw.uniform(0, 1)), 4)
    if column.raw:
        return int(draw.integers(0, 100))
    most = column.num_ids or _UNBOUNDED_IDS
    return int(draw.integers(min(3, most - 1), most))
