"""Redistribution of the rows of all processes by group: each process gets complete groups.

Shapes: N rows of this process, n processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.metrics.registry import Processes

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: neighbouring ids are spread
_HALF: Final = np.uint64(32)


def exchange_groups(
    processes: Processes, groups: NDArray[np.int64], columns: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.int64], list[NDArray[np.float32]]]:
    """Send every row to the process that the hash of its group selects.

    Args:
        groups: (N,).
        columns: (N,) each, the same number on every process.

    Returns:
        Groups and columns of the received rows; the rows of one process keep their order.
    """
    target = ((groups.astype(np.uint64) * _MIX) >> _HALF) % np.uint64(processes.size)
    order = np.argsort(target, kind="stable")
    given = np.bincount(target.astype(np.int64), minlength=processes.size).tolist()
    taken = [one[processes.rank] for one in processes.gather_numbers(given)]
    ids = processes.all_to_all(torch.from_numpy(groups[order]), given, taken).numpy()
    found = []
    for column in columns:
        flat = torch.from_numpy(np.ascontiguousarray(column[order], dtype=np.float32))
        found.append(processes.all_to_all(flat, given, taken).numpy())
    return ids, found
