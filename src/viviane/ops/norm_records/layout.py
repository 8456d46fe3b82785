"""The layout of Norm records, the arrays that they are read into, and the problems that they may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

PROBLEMS: Final = {
    1: "the file ends inside a record; it is truncated, or the header counts too many records",
    2: "the check sum of a record is wrong",
    3: "the length in front of a record is not that of its slots",
    4: "a slot has a negative number of keys",
}


@dataclass(frozen=True)
class NormLayout:
    """What a record holds.

    Args:
        num_numbers: labels and dense numbers, P.
        num_slots: S.
        key_bytes: 4 (unsigned) or 8 (signed).
        check_sum: records are framed by a length and a checksum.
    """

    num_numbers: int
    num_slots: int
    key_bytes: int
    check_sum: bool


@dataclass(frozen=True)
class Problem:
    """Why a record cannot be read.

    Args:
        code: a key of PROBLEMS.
        record: its number, from the first one that was requested.
        byte: where in the data.
    """

    code: int
    record: int
    byte: int


@dataclass(frozen=True)
class NormRecords:
    """Records taken apart.

    Args:
        numbers: labels and dense numbers, (R, P).
        lengths: keys of each record in each slot, (S, R).
        keys: of slot 0 in the order of the records, then of slot 1, ..., (nnz,).
        end: first byte after the records.
    """

    numbers: NDArray[np.float32]
    lengths: NDArray[np.int32]
    keys: NDArray[np.int64]
    end: int
