"""Take apart and put together the records of a HugeCTR Norm file: rows of different lengths, one after another.

A record is  float32 numbers (P of them: labels, then dense) | per slot: int32 nnz, nnz keys.  With check sums it stands
between its length (int32) and one byte, the sum of its bytes modulo 256.
Files are read by the CPU whatever the tables' device, so there is one implementation.
Shapes: R records, P numbers of a record, S slots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from viviane.ops.norm_records.layout import PROBLEMS, NormLayout, NormRecords, Problem

__all__ = ["PROBLEMS", "NormLayout", "NormRecords", "Problem", "norm_records", "pack_records", "skip_records"]


def norm_records(data: NDArray[np.uint8], start: int, count: int, layout: NormLayout) -> NormRecords | Problem:
    """Take `count` records apart, the first of which begins at byte `start`.

    Returns: the records, or the first problem.

    Example:
        >>> data = np.frombuffer(np.float32([1, 0.5]).tobytes() + np.uint32([2, 7, 8]).tobytes(), np.uint8)
        >>> found = norm_records(data, 0, 1, NormLayout(num_numbers=2, num_slots=1, key_bytes=4, check_sum=False))
        >>> found.numbers.tolist(), found.keys.tolist()
        ([[1.0, 0.5]], [7, 8])
    """
    from viviane.ops.norm_records import cpu

    return cpu.norm_records(data, start, count, layout)


def skip_records(data: NDArray[np.uint8], start: int, count: int, layout: NormLayout) -> int | Problem:
    """Return the first byte after `count` records, or the first problem."""
    from viviane.ops.norm_records import cpu

    return cpu.skip_records(data, start, count, layout)


def pack_records(
    numbers: NDArray[np.float32], lengths: NDArray[np.int32], keys: NDArray[np.int64], layout: NormLayout
) -> NDArray[np.uint8]:
    """Put records together: the inverse of `norm_records`.

    Args:
        numbers: labels and dense numbers, (R, P).
        lengths: keys of each record in each slot, (S, R).
        keys: of slot 0 in the order of the records, then of slot 1, ..., (nnz,).
        layout: of the records.

    Example:
        >>> layout = NormLayout(num_numbers=1, num_slots=1, key_bytes=4, check_sum=True)
        >>> pack_records(np.ones((1, 1), np.float32), np.array([[1]], np.int32), np.array([7]), layout).tolist()
        [12, 0, 0, 0, 0, 0, 128, 63, 1, 0, 0, 0, 7, 0, 0, 0, 199]
    """
    from viviane.ops.norm_records import cpu

    return cpu.pack_records(numbers, lengths, keys, layout)
