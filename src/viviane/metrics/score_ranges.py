"""Redistribution of the rows of all processes by score: each process gets a range of scores, with all ties.

Shapes: N rows of this process, n processes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.metrics.registry import Processes

_SAMPLES: Final = 256  # quantiles sent by each process: the sizes of ranges differ by about 1/256


def exchange_rows(
    processes: Processes, scores: NDArray[np.float32], labels: NDArray[np.float32], weights: NDArray[np.float32] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None]:
    """Send every process the rows of one range of scores, ascending with the rank.

    Args:
        scores: (N,), finite.
        labels: (N,).
        weights: (N,), or None on every process.

    Returns:
        Scores, labels and weights of this process's range, unordered.
    """
    bounds = _bounds(processes, scores)
    target = np.searchsorted(bounds, scores, side="right")  # equal scores have the same target
    order = np.argsort(target, kind="stable")
    given = np.bincount(target, minlength=processes.size).tolist()
    taken = [one[processes.rank] for one in processes.gather_numbers(given)]

    def send(values: NDArray[np.float32]) -> NDArray[np.float32]:
        flat = torch.from_numpy(np.ascontiguousarray(values[order], dtype=np.float32))
        found: NDArray[np.float32] = processes.all_to_all(flat, given, taken).numpy()
        return found

    return send(scores), send(labels), None if weights is None else send(weights)


def _bounds(processes: Processes, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return n - 1 ascending scores that split all rows into parts of about equal size."""
    sample = np.empty((0, 2), np.float64)
    if len(scores):
        places = np.linspace(0, len(scores) - 1, _SAMPLES).astype(np.int64)
        quantiles = np.partition(scores, np.unique(places))[places]
        sample = np.stack([quantiles, np.full(_SAMPLES, len(scores) / _SAMPLES)], 1).astype(np.float64)
    every = torch.cat(processes.gather(torch.from_numpy(sample.reshape(-1)))).numpy().reshape(-1, 2)
    every = every[np.argsort(every[:, 0], kind="stable")]
    reached = np.cumsum(every[:, 1])
    wanted = (reached[-1] if len(reached) else 0.0) * np.arange(1, processes.size) / processes.size
    found = every[np.minimum(np.searchsorted(reached, wanted), max(0, len(every) - 1)), 0] if len(every) else wanted
    return found.astype(np.float32)
