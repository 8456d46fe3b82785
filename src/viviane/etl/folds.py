"""Folds of rows: a whole number per row, mixed and divided; the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.config import EtlConfig
from viviane.etl.derivations import TargetEncode
from viviane.etl.engine import Engine
from viviane.etl.values import combined, hash_values


def fold_column(name: str) -> str:
    """The staged column with the folds of a target encoding."""
    return f"__fold_{name}"


def add_folds(table: pa.Table, config: EtlConfig, engine: Engine, first_row: int) -> pa.Table:
    """Append the fold of each row, for each target encoding.

    Args:
        first_row: number of the table's first row among all usable rows of the run.
    """
    for one in config.derived:
        if isinstance(one, TargetEncode):
            numbers = np.arange(first_row, first_row + table.num_rows, dtype=np.uint64)
            if one.fold_by is not None:
                hashes = hash_values(table.column(one.fold_by), engine.evaluate)
                numbers = pc.fill_null(combined(hashes), -1).to_numpy(zero_copy_only=False).astype(np.uint64)
            folds: Any = pa.array(fold_of(numbers, one.folds, one.seed))
            table = table.append_column(fold_column(one.name), folds)
    return table


def fold_of(numbers: NDArray[np.uint64], num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return a fold for each number: SplitMix64 of number + seed 2^32, modulo the number of folds.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.

    Example:
        >>> fold_of(np.arange(8, dtype=np.uint64), 2, 0).tolist()
        [1, 1, 0, 1, 0, 0, 0, 1]
    """
    with np.errstate(over="ignore"):
        mixed = numbers + (np.uint64(seed) << np.uint64(32)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(num_folds)).astype(np.int64)
