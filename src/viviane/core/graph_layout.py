"""Layout of a graph's boxes and wires: layers from top to bottom, neighbours close to each other.

A wire that crosses layers gets a position in each of them, so that it does not overlap boxes.

Source: Sugiyama, Tagawa and Toda 1981 (layers, then order by the mean position of neighbours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

GAP_X: Final = 26.0
GAP_Y: Final = 44.0
MARGIN: Final = 16.0
_SWEEPS: Final = 8
_WIRE_WIDTH: Final = 4.0

Edge = tuple[str, str]


@dataclass
class Placed:
    """The upper left corner and size, in pixels, of a box or of a wire that crosses a layer."""

    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        """The x of its middle."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height


@dataclass
class Layout:
    """The positions of all boxes and wires.

    Args:
        boxes: by name.
        wires: for each edge its stations from source to reader, inclusive.
        width, height: total size.
    """

    boxes: dict[str, Placed] = field(default_factory=dict)
    wires: dict[Edge, list[Placed]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Sequence[Edge]) -> Layout:
    """Place boxes so that every edge points down.

    Args:
        sizes: width and height of each box; sources precede their readers.
        edges: (source, reader) pairs.

    Example:
        >>> layout = lay_out({"a": (40, 20), "b": (40, 20)}, [("a", "b")])
        >>> layout.boxes["a"].bottom < layout.boxes["b"].y
        True
    """
    depth = _depths(list(sizes), edges)
    rows: list[list[Placed]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    layout = Layout({name: Placed(*size) for name, size in sizes.items()})
    for name, box in layout.boxes.items():
        rows[depth[name]].append(box)
    for a, b in edges:
        passing = [Placed(_WIRE_WIDTH, 0.0) for _ in range(depth[a] + 1, depth[b])]
        for level, station in enumerate(passing, depth[a] + 1):
            rows[level].append(station)
        layout.wires[a, b] = [layout.boxes[a], *passing, layout.boxes[b]]
    above, below = _neighbours(layout)
    _order(rows, above, below)
    _spread(rows, above, below)
    y = MARGIN
    for row in rows:
        height = max((one.height for one in row), default=0.0)
        for one in row:
            one.height = one.height or height  # a wire spans the height of the row
            one.y = y + (height - one.height) / 2
        y += height + GAP_Y
    everything = [one for row in rows for one in row]
    left = min((one.x for one in everything), default=0.0)
    for one in everything:
        one.x += MARGIN - left
    layout.width = max((one.x + one.width for one in everything), default=0.0) + MARGIN
    layout.height = y - GAP_Y + MARGIN
    return layout


def _depths(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    depth: dict[str, int] = {}
    for name in names:
        depth[name] = max((depth[a] + 1 for a, b in edges if b == name), default=0)
    sources = set(names) - {b for _, b in edges}
    for name in sources:  # a box without sources is placed directly above its first reader
        depth[name] = min((depth[b] for a, b in edges if a == name), default=1) - 1
    return depth


def _neighbours(layout: Layout) -> tuple[dict[int, list[Placed]], dict[int, list[Placed]]]:
    above: dict[int, list[Placed]] = {}
    below: dict[int, list[Placed]] = {}
    for stations in layout.wires.values():
        for upper, lower in pairwise(stations):
            above.setdefault(id(lower), []).append(upper)
            below.setdefault(id(upper), []).append(lower)
    return above, below


def _order(rows: list[list[Placed]], above: Mapping[int, list[Placed]], below: Mapping[int, list[Placed]]) -> None:
    """Sort each row by the mean position of its neighbours in the previous row, alternating down and up."""
    place = {id(one): (i + 0.5) / len(row) for row in rows for i, one in enumerate(row)}
    for sweep in range(_SWEEPS):
        near, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        for row in order:
            score = {}
            for one in row:
                others = [place[id(other)] for other in near.get(id(one), [])]
                score[id(one)] = sum(others) / len(others) if others else place[id(one)]
            row.sort(key=lambda one: score[id(one)])
            place.update({id(one): (i + 0.5) / len(row) for i, one in enumerate(row)})


def _spread(rows: list[list[Placed]], above: Mapping[int, list[Placed]], below: Mapping[int, list[Placed]]) -> None:
    """Move boxes towards the mean of their neighbours, keeping their order and without overlap."""
    for row in rows:
        x = -(sum(one.width for one in row) + GAP_X * (len(row) - 1)) / 2
        for one in row:
            one.x, x = x, x + one.width + GAP_X
    for sweep in range(_SWEEPS):
        near, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        for row in order:
            wanted = []
            for one in row:
                others = near.get(id(one), [])
                middle = sum(other.middle for other in others) / len(others) if others else one.middle
                wanted.append(middle - one.width / 2)
            end = float("-inf")
            for one, x in zip(row, wanted, strict=True):
                one.x = max(x, end)
                end = one.x + one.width + GAP_X
            shift = sum(x - one.x for one, x in zip(row, wanted, strict=True)) / max(1, len(row))
            for one in row:
                one.x += shift
