"""Drawing of a graph as SVG: no scripts or network access, for print, light and dark mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final

from viviane.core.graph_layout import Edge, Placed, lay_out

_CHARACTER: Final = 6.9  # pixels of a character at 12 px
_LINE: Final = 16.0
_PADDING: Final = 10.0
_LEAST_WIDTH: Final = 640.0  # of a wide drawing, so that its text can be read; it scrolls where there is less room

# Separate colours for light and dark mode: the drawing works alone or inside a page.
_STYLE: Final = """
.graph { --ink: #1d2433; --soft: #5c6579; --card: #ffffff; --edge: #b9c0cf;
  --input: #1f8a70; --table: #d9702b; --layer: #2f62c9; --loss: #a63d7d; }
@media (prefers-color-scheme: dark) { .graph { --ink: #e6e9f0; --soft: #9aa3b5; --card: #1b1f29; --edge: #4a5163;
  --input: #5fc9ac; --table: #f0a066; --layer: #7aa2f7; --loss: #df86bb; } }
.graph text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.graph .title { font-weight: 600; fill: var(--ink); }
.graph .box { fill: var(--card); stroke-width: 1.5; }
.graph .input { stroke: var(--input); } .graph .table { stroke: var(--table); }
.graph .layer { stroke: var(--layer); } .graph .loss { stroke: var(--loss); }
.graph .wire { fill: none; stroke: var(--edge); stroke-width: 1.5; }
.graph .tip { fill: var(--edge); }
"""


@dataclass(frozen=True)
class Box:
    """A box of a drawing.

    Args:
        kind: "input", "table", "layer" or "loss": determines its colour.
        lines: lines of text; the first is the title.
    """

    kind: str
    lines: tuple[str, ...]

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels."""
        longest = max(len(line) for line in self.lines)
        return max(70.0, longest * _CHARACTER + 2 * _PADDING), len(self.lines) * _LINE + 2 * _PADDING - 4


def draw_graph(boxes: Mapping[str, Box], edges: Sequence[Edge], title: str) -> str:
    """Return an <svg> element that works alone or inside a page.

    Args:
        boxes: by name.
        edges: pairs of names, from above to below.
        title: description for screen readers.

    Example:
        >>> boxes = {"a": Box("input", ("a",)), "b": Box("layer", ("b", "sum"))}
        >>> draw_graph(boxes, [("a", "b")], "a sum").count("<rect")
        2
    """
    layout = lay_out({name: box.size for name, box in boxes.items()}, edges)
    width, height = layout.width, layout.height
    wires = "".join(_wire(stations) for stations in layout.wires.values())
    least = min(_LEAST_WIDTH, 0.7 * width)
    drawn = "".join(_draw(boxes[name], place) for name, place in layout.boxes.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="min-width: {least:.0f}px; max-width: {width:.0f}px" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{_STYLE}</style>'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>{wires}{drawn}</svg>\n'
    )


def _draw(box: Box, place: Placed) -> str:
    parts = [
        f'<rect class="box {box.kind}" x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" '
        f'height="{place.height:.1f}" rx="7"/>'
    ]
    for number, line in enumerate(box.lines):
        kind = ' class="title"' if number == 0 else ""
        y = place.y + _PADDING + 9 + number * _LINE
        parts.append(f'<text{kind} x="{place.middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(line)}</text>')
    return "<g>" + "".join(parts) + "</g>"


def _wire(stations: Sequence[Placed]) -> str:
    """Draw a wire through its stations: a curve between rows, a vertical line within a row."""
    parts = [f"M{stations[0].middle:.1f} {stations[0].bottom:.1f}"]
    for upper, lower in pairwise(stations):
        bend = (lower.y - upper.bottom) / 2
        parts.append(
            f"C{upper.middle:.1f} {upper.bottom + bend:.1f} {lower.middle:.1f} {lower.y - bend:.1f} "
            f"{lower.middle:.1f} {lower.y:.1f}"
        )
        if lower is not stations[-1]:
            parts.append(f"V{lower.bottom:.1f}")
    return f'<path class="wire" marker-end="url(#tip)" d="{" ".join(parts)}"/>'
