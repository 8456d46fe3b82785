"""Small inline SVG charts: no script, no network, readable in print and in the dark.

A plotting library would weigh megabytes in every report and is not part of a bare install; five kinds of
chart are all a run needs. Colours come from the page's style sheet (classes c0 to c7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from viviane.report.scale import Scale, short, span, thin

Point = tuple[float, float]

LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 40
_TONES: Final = ("#2f62c9", "#d9702b", "#1f8a70", "#a63d7d", "#8a6d1b", "#5a4fc0", "#3b8ea5", "#7a7f8c")
_PICTURE_STYLE: Final = (  # tones that can be seen on white and on black
    "text{font:11px sans-serif;fill:#7a8194}.grid{stroke:#9aa3b5;stroke-opacity:.3}.line{fill:none;stroke-width:2}"
    + "".join(f".line.c{i}{{stroke:{tone}}}.dot.c{i}{{fill:{tone}}}" for i, tone in enumerate(_TONES))
)


@dataclass(frozen=True)
class Line:
    """One curve of a line chart.

    Args:
        name: shown in the legend.
        points: (x, y) pairs, x rising; y that are not finite are left out.
        marks: draw a dot at each point.
        joined: connect the points; False for points without an order.
        dashed: for a reference such as the best reachable value.
        tone: index of the colour; None takes the line's place in the chart.
    """

    name: str
    points: Sequence[Point]
    marks: bool = False
    joined: bool = True
    dashed: bool = False
    tone: int | None = None


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    square: bool = False,
    width: int = 520,
    height: int = 290,
) -> str:
    """Return an SVG with one curve per `Line`, axes, grid and a legend.

    Args:
        square: give both axes the range 0 to 1 (calibration).

    Example:
        >>> "<svg" in line_chart([Line("auc", [(1, 0.6), (2, 0.7)])], x_label="step", y_label="AUC")
        True
    """
    kept = [(line, _visible(line.points, log_x, log_y)) for line in lines]
    kept = [(line, points) for line, points in kept if points]
    if not kept:
        return '<p class="empty">Nothing was recorded for this chart.</p>'
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points]
    x_low, x_high = (0.0, 1.0) if square else span(xs, log=log_x, pad=0.02)
    y_low, y_high = (0.0, 1.0) if square else span(ys, log=log_y)
    x_axis = Scale(x_low, x_high, LEFT, width - RIGHT, log_x)
    y_axis = Scale(y_low, y_high, height - BOTTOM, TOP, log_y)
    parts = [_frame(x_axis, y_axis, x_label, y_label, width, height)]
    for index, (line, points) in enumerate(kept):
        tone = line.tone if line.tone is not None else index % 8
        path = "M" + "L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        if line.joined:
            parts.append(f'<path class="line c{tone}" d="{path}"{dash}><title>{escape(line.name)}</title></path>')
        if line.marks:
            parts.extend(
                f'<circle class="dot c{tone}" cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="3.5">'
                f"<title>{escape(line.name)}: {short(x)}, {y:.5g}</title></circle>"
                for x, y in points
            )
    return _svg(parts, width, height, y_label) + _legend([line for line, _ in kept])


def line_picture(lines: Sequence[Line], *, x_label: str, y_label: str, width: int = 520, height: int = 290) -> str:
    """Return a line chart as the content of an SVG file, whose style and legend are inside.

    Example:
        >>> line_picture([Line("auc", [(1, 0.6), (2, 0.7)])], x_label="step", y_label="AUC").startswith("<svg xmlns=")
        True
    """
    chart, end, _ = line_chart(lines, x_label=x_label, y_label=y_label, width=width, height=height).partition("</svg>")
    drawn = chart.partition(">")[2] if end else f'<text x="{LEFT}" y="{height // 2}">Nothing was recorded.</text>'
    keys = "".join(
        f'<rect class="dot c{line.tone if line.tone is not None else i % 8}" x="{LEFT}" y="{height + 18 * i}" '
        f'width="11" height="11" rx="3"/><text class="name" x="{LEFT + 17}" y="{height + 18 * i + 10}">'
        f"{escape(line.name)}</text>"
        for i, line in enumerate(lines)
    )
    whole = height + 18 * len(lines) + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" role="img" '
        f'aria-label="{escape(y_label)}"><style>{_PICTURE_STYLE}</style>{drawn}{keys}</svg>\n'
    )


def _visible(points: Sequence[Point], log_x: bool, log_y: bool) -> list[Point]:
    good = [
        (x, y)
        for x, y in points
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]
    return thin(good)


def bar_chart(
    bars: Sequence[tuple[str, float]], *, x_label: str, log: bool = False, share: bool = False, width: int = 520
) -> str:
    """Return an SVG of horizontal bars with their values written at the end.

    Args:
        bars: (name, value) from top to bottom; values >= 0.
        log: bar lengths follow the logarithm; for values over many powers of ten.
        share: write the percentage of the sum beside each value.
    """
    if not bars:
        return '<p class="empty">Nothing was recorded for this chart.</p>'
    row, left = 20, 130
    height = row * len(bars) + 30
    top_value = max(value for _, value in bars) or 1.0
    total = sum(value for _, value in bars) or 1.0
    length = Scale(0.0, math.log10(1 + top_value) if log else top_value, 0, width - left - (110 if share else 70))
    parts = []
    for index, (name, value) in enumerate(bars):
        y = index * row + 4
        size = length(math.log10(1 + value) if log else value)
        text = f"{short(value)} ({value / total:.1%})" if share else short(value)
        label = name if len(name) <= 18 else name[:17] + "…"
        parts.append(
            f'<text class="name" x="{left - 8}" y="{y + 11}" text-anchor="end">{escape(label)}</text>'
            f'<rect class="bar c0" x="{left}" y="{y}" width="{max(size, 1):.1f}" height="14" rx="3">'
            f"<title>{escape(name)}: {value:,.6g}</title></rect>"
            f'<text class="value" x="{left + max(size, 1) + 6:.1f}" y="{y + 11}">{text}</text>'
        )
    scale_note = " (logarithmic length)" if log else ""
    parts.append(f'<text class="label" x="{left}" y="{height - 8}">{escape(x_label + scale_note)}</text>')
    return _svg(parts, width, height, x_label)


def share_bar(parts: Sequence[tuple[str, float]], *, unit: str, width: int = 1080) -> str:
    """Return one bar cut into shares, with a legend that gives each part's value and percentage."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return '<p class="empty">No time was recorded.</p>'
    x, pieces, legend = 0.0, [], []
    for index, (name, value) in enumerate(parts):
        size = value / total * width
        text = f"{name}: {short(value)} {unit} ({value / total:.1%})"
        pieces.append(
            f'<rect class="bar c{index % 8}" x="{x:.1f}" y="0" width="{max(size - 1.5, 0.5):.1f}" height="26" rx="3">'
            f"<title>{escape(text)}</title></rect>"
        )
        legend.append(f'<span class="key"><i class="c{index % 8}"></i>{escape(text)}</span>')
        x += size
    return _svg(pieces, width, 26, "time per stage") + f'<div class="legend">{"".join(legend)}</div>'


def _frame(x_axis: Scale, y_axis: Scale, x_label: str, y_label: str, width: int, height: int) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_axis.ticks(6):
        x = x_axis(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        )
    middle_x, middle_y = (LEFT + width - RIGHT) / 2, (TOP + height - BOTTOM) / 2
    parts.append(f'<text class="label" x="{middle_x}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="label" x="13" y="{middle_y}" text-anchor="middle" '
        f'transform="rotate(-90 13 {middle_y})">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _svg(parts: Sequence[str], width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    keys = "".join(
        f'<span class="key"><i class="c{line.tone if line.tone is not None else i % 8}"></i>{escape(line.name)}</span>'
        for i, line in enumerate(lines)
    )
    return f'<div class="legend">{keys}</div>'
