"""Axis arithmetic for charts: from data to pixels, and where the ticks go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from [low, high] to pixels [start, stop].

    Example:
        >>> Scale(0, 10, 0, 100)(5)
        50.0
        >>> Scale(1, 100, 0, 100, log=True)(10)
        50.0
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values inside the range: steps of 1, 2 or 5 on a linear scale.

        On a log scale: powers of ten, with their double and fivefold where there are few, and steps where the range is
        too narrow for these.
        """
        if self.log:
            found = self._powers(count)
            if len(found) > 2 or self.high > 10 * self.low:  # linear steps would leave out the lower decades
                return found
        raw = (self.high - self.low) / count
        base = 10.0 ** math.floor(math.log10(raw))
        step_size = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw * 0.999)
        first = math.ceil(self.low / step_size - 1e-9)
        last = math.floor(self.high / step_size + 1e-9)
        return [round(i * step_size, 12) for i in range(first, last + 1)]

    def _powers(self, count: int) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first > 1:
            step = max(1, math.ceil((last - first) / count))
            return [10.0**power for power in range(first, last + 1, step)]
        found = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        return [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]


def span(values: Iterable[float], *, log: bool = False, pad: float = 0.06) -> tuple[float, float]:
    """Return a range around finite values, widened a little; never empty.

    Example:
        >>> span([2.0, 2.0])
        (1.0, 3.0)
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not finite:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(finite), max(finite)
    if log:
        return (low / 1.3, high * 1.3) if low < high else (low / 10, high * 10)
    if low == high:
        width = abs(low) / 2 or 1.0
        return low - width, high + width
    margin = (high - low) * pad
    return low - margin, high + margin


def short(value: float) -> str:
    """Write a number for a tick or a table cell in at most about six characters.

    Example:
        >>> [short(x) for x in (0, 1234567, 1500, 0.25, 3e-5, 12)]
        ['0', '1.23M', '1.5k', '0.25', '3e-05', '12']
    """
    if value == 0:
        return "0"
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{letter}"
    if size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}"


def thin(points: Sequence[tuple[float, float]], limit: int = 600) -> list[tuple[float, float]]:
    """Keep at most about `limit` points of a long curve: each bucket's lowest and highest, ends included."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for begin in range(0, len(points), size):
        bucket = range(begin, min(begin + size, len(points)))
        kept.add(min(bucket, key=lambda i: points[i][1]))
        kept.add(max(bucket, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]
