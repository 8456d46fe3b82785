"""Places of a graph's boxes: layers from top to bottom, neighbours near each other.

Source: Sugiyama, Tagawa and Toda 1981 (layers, then order by the mean place of neighbours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

GAP_X: Final = 28.0
GAP_Y: Final = 46.0
MARGIN: Final = 16.0
_SWEEPS: Final = 6


@dataclass(frozen=True)
class Placed:
    """A box: its left upper corner and its size, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The x of its middle."""
        return self.x + self.width / 2


def lay_out(
    sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]]
) -> tuple[dict[str, Placed], float, float]:
    """Place boxes so that every edge points down.

    Args:
        sizes: width and height of each box; sources stand before what reads them.
        edges: (source, reader) pairs.

    Returns:
        the places, and the width and height of the whole.

    Example:
        >>> places, width, height = lay_out({"a": (40, 20), "b": (40, 20)}, [("a", "b")])
        >>> places["a"].y < places["b"].y
        True
    """
    depth = dict.fromkeys(sizes, 0)
    for name in sizes:
        depth[name] = max((depth[a] + 1 for a, b in edges if b == name), default=0)
    for name in reversed(list(sizes)):  # a box without sources stands right above its first reader
        below = [depth[b] for a, b in edges if a == name]
        if below and not any(b == name for _, b in edges):
            depth[name] = min(below) - 1
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for name in sizes:
        rows[depth[name]].append(name)
    _order(rows, edges)
    return _place(rows, sizes)


def _order(rows: list[list[str]], edges: Sequence[tuple[str, str]]) -> None:
    """Sort each row by the mean place of its neighbours in the other rows, down and up in turn."""
    for sweep in range(_SWEEPS):
        place = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            score = {}
            for name in row:
                near = [place[a] for a, b in edges if b == name] if down else [place[b] for a, b in edges if a == name]
                score[name] = sum(near) / len(near) if near else place[name]
            row.sort(key=lambda name: score[name])
            place.update({name: (i + 0.5) / len(row) for i, name in enumerate(row)})


def _place(
    rows: Sequence[Sequence[str]], sizes: Mapping[str, tuple[float, float]]
) -> tuple[dict[str, Placed], float, float]:
    widths = [sum(sizes[name][0] for name in row) + GAP_X * (len(row) - 1) for row in rows]
    whole = max(widths, default=0.0)
    places: dict[str, Placed] = {}
    y = MARGIN
    for row, width in zip(rows, widths, strict=True):
        x = MARGIN + (whole - width) / 2
        height = max(sizes[name][1] for name in row)
        for name in row:
            places[name] = Placed(x, y + (height - sizes[name][1]) / 2, *sizes[name])
            x += sizes[name][0] + GAP_X
        y += height + GAP_Y
    return places, whole + 2 * MARGIN, y - GAP_Y + MARGIN
