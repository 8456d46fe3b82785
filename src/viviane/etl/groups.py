"""What group derivations learn: a number per key and derived column, and, for training rows, per fold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.cells import list_parts
from viviane.etl.values import combined

_KEY: Final = "__key"  # no derived column begins with two underscores
_FOLD: Final = "__fold"


@dataclass(frozen=True)
class Groups:
    """Looked up by key; K keys, and place K for a key that is unseen or missing.

    Args:
        keys: distinct keys, a pyarrow array (K,).
        values: by derived column, float64 (K + 1,), NaN where missing.
        folds: by derived column, float64 (num_folds, K + 1): what rows of each fold take; empty once it is saved
            with a fitted ETL, which meets no training rows.

    Example:
        >>> groups = Groups(pa.array(["a", "b"]), {"n": np.array([2.0, 1.0, 0.0])})
        >>> groups.columns(pa.array(["b", None, "new"]), None)["n"].to_pylist()
        [1.0, 0.0, 0.0]
    """

    keys: Any
    values: Mapping[str, NDArray[np.float64]]
    folds: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def columns(self, keys: Any, folds: NDArray[np.int64] | None) -> dict[str, Any]:
        """Return the derived columns of rows, missing for NaN.

        Args:
            keys: one per row, or a list per row, which gives the mean over its values.
            folds: of each row, -1 for a row that is not of the training part; None where no row is.
        """
        listed = pa.types.is_list(keys.type)
        offsets, flat = list_parts(keys) if listed else (np.arange(len(keys) + 1), keys)
        places = self.places(flat)
        own = None if folds is None else np.repeat(folds, np.diff(offsets))
        found = {}
        for name in self.values:
            numbers = self._numbers(name, places, own)
            if listed:
                there = pc.is_valid(flat).to_numpy(zero_copy_only=False) & ~np.isnan(numbers)
                empty = self._numbers(name, np.full(len(keys), len(self.keys)), folds)  # what a missing key gives
                numbers = _means(np.where(there, numbers, 0.0), there, offsets, empty)
            found[name] = pa.array(numbers, mask=np.isnan(numbers))
        return found

    def _numbers(self, name: str, places: NDArray[np.int64], folds: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """Values at positions, or for training rows those of their fold."""
        numbers = self.values[name][places]
        if folds is None or name not in self.folds:
            return numbers
        return np.where(folds >= 0, self.folds[name][np.maximum(folds, 0), places], numbers)

    def places(self, keys: Any) -> NDArray[np.int64]:
        """Place of each row's key, K where it is unseen or missing."""
        return place_of(keys, self.keys)

    def to_table(self, *, folds: bool) -> pa.Table:
        """Return a table of K + 1 rows, with or without what only training rows take."""
        columns: dict[str, Any] = {_KEY: pa.concat_arrays([self.keys, pa.nulls(1, self.keys.type)])}
        columns |= {name: pa.array(values) for name, values in self.values.items()}
        if folds:
            for name, rows in self.folds.items():
                columns |= {f"{_FOLD}{number}_{name}": pa.array(row) for number, row in enumerate(rows)}
        return pa.table(columns)

    @classmethod
    def of_table(cls, table: pa.Table) -> Groups:
        """Read what `to_table` gave."""
        arrays: dict[str, Any] = {name: combined(table.column(name)) for name in table.column_names}
        keys = arrays.pop(_KEY)
        numbers = {name: one.to_numpy() for name, one in arrays.items()}
        values = {name: one for name, one in numbers.items() if not name.startswith(_FOLD)}
        folds: dict[str, NDArray[np.float64]] = {}
        for name in values:
            rows: list[NDArray[np.float64]] = []
            while (row := numbers.get(f"{_FOLD}{len(rows)}_{name}")) is not None:
                rows.append(row)
            folds |= {name: np.stack(rows)} if rows else {}
        return cls(keys.slice(0, len(keys) - 1), values, folds)


def _means(
    numbers: NDArray[np.float64], there: NDArray[np.bool_], offsets: NDArray[np.int64], empty: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean over the values of each list that are there, added in their order; `empty` where there is none."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    sums = np.bincount(rows, numbers, minlength=len(offsets) - 1)
    counts = np.bincount(rows, there, minlength=len(offsets) - 1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), empty)


def place_of(keys: Any, known: Any) -> NDArray[np.int64]:
    """Position of each value in `known`, len(known) where it is not there or missing."""
    places = pc.index_in(keys, value_set=known, skip_nulls=True)
    found: NDArray[np.int64] = pc.fill_null(places, len(known)).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def encode_targets(
    sums: NDArray[np.float64], counts: NDArray[np.float64], smoothing: float, prior: float
) -> NDArray[np.float64]:
    """(sum + smoothing prior) / (count + smoothing); the prior where that is 0 / 0.

    Example:
        >>> encode_targets(np.array([3.0, 0.0]), np.array([4.0, 0.0]), 0.0, 0.5).tolist()
        [0.75, 0.5]
    """
    weight = counts + smoothing
    return np.where(weight > 0, (sums + smoothing * prior) / np.where(weight > 0, weight, 1.0), prior)


def medians(at: NDArray[np.int64], x: NDArray[np.float64], num_keys: int) -> NDArray[np.float64]:
    """Median of the numbers of each key, the mean of the middle two where their count is even; NaN where there is none.

    Args:
        at: place of the key of each number.
        x: numbers, none of them NaN.

    Example:
        >>> medians(np.array([0, 2, 0, 2, 2]), np.array([5.0, 1.0, 2.0, 1.0, 9.0]), 3).tolist()
        [3.5, nan, 1.0]
    """
    order = np.lexsort((x, at))
    x = x[order]
    counts = np.bincount(at, minlength=num_keys)
    starts = np.cumsum(counts) - counts
    found = np.full(num_keys, np.nan)
    some = counts > 0
    low, high = ((starts + (counts - one) // 2)[some] for one in (1, 0))
    found[some] = np.where(x[low] == x[high], x[low], x[low] * 0.5 + x[high] * 0.5)  # their sum could overflow
    return found
