"""Ranks with a power-law distribution, as in click logs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def power_law_ranks(uniform: NDArray[np.float64], cardinality: int, alpha: float) -> NDArray[np.int64]:
    """Convert uniform numbers to ranks 0 <= r < cardinality with density ~ (r + 1)^-alpha.

    The inverse of the distribution function on [1, M), M = cardinality + 1, rounded down:

        y = ((M^(1 - alpha) - 1) u + 1)^(1 / (1 - alpha)),   y = M^u  if alpha = 1,   r = floor(y) - 1

    Args:
        uniform: numbers u in [0, 1), (R,).
        cardinality: number of ranks.
        alpha: the exponent; 0 is uniform.

    Source: HugeCTR's data generator uses the same inverse.

    Example:
        >>> power_law_ranks(np.array([0.0, 0.5, 0.999]), 1000, 1.1).tolist()
        [0, 16, 990]
    """
    top = float(cardinality + 1)
    if abs(alpha - 1.0) < 1e-9:
        values = np.exp(uniform * np.log(top))
    else:
        power = 1.0 - alpha
        values = (uniform * (top**power - 1.0) + 1.0) ** (1.0 / power)
    # rounding may yield M for u close to 1
    ranks: NDArray[np.int64] = np.minimum(values.astype(np.int64) - 1, cardinality - 1)
    return ranks


def power_law_share(cardinality: int, alpha: float, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the probability of each rank under `power_law_ranks`.

    F(y) = (y^(1 - alpha) - 1) / (M^(1 - alpha) - 1), or log y / log M;  p(r) = F(r + 2) - F(r + 1).

    Example:
        >>> power_law_share(3, 0.0, np.array([0, 1, 2])).round(3).tolist()
        [0.333, 0.333, 0.333]
    """

    def below(y: NDArray[Any]) -> NDArray[Any]:
        if abs(alpha - 1.0) < 1e-9:
            return np.asarray(np.log(y) / np.log(cardinality + 1.0))
        power = 1.0 - alpha
        return np.asarray((y**power - 1.0) / ((cardinality + 1.0) ** power - 1.0))

    share: NDArray[np.float64] = below(ranks + 2.0) - below(ranks + 1.0)
    return share
