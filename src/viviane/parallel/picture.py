"""A drawing of a plan: for each process what it holds, and how long an iteration keeps it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TypeAlias

from viviane.parallel.costs import Cost
from viviane.parallel.planner import Planned

_Value: TypeAlias = Callable[[Cost], float]

_LEFT, _WIDTH, _BAR, _GAP, _TOP = 90, 620, 22, 8, 34
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#9c8a1c", "#2a8bb8", "#aa3377", "#bbbbbb", "#999933")


def plan_svg(planned: Planned) -> str:
    """Return an SVG with one bar a process for bytes, and one for milliseconds; a piece for each table.

    A piece's name is shown where it fits, and when the mouse rests on it.
    """
    size = planned.plan.world_size
    panel = _TOP + size * (_BAR + _GAP) + 18
    parts = [
        _panel(planned, 0, "GB held", lambda cost: cost.held / 1e9),
        _panel(planned, panel, "ms an iteration", lambda cost: cost.milliseconds(planned.machine)),
    ]
    width, height = _LEFT + _WIDTH + 90, 2 * panel
    style = "text{font:12px sans-serif;fill:#333}.p{font-size:10px;fill:#fff}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Where the tables are"><style>{style}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _panel(planned: Planned, top: float, title: str, value: _Value) -> str:
    ranks = range(planned.plan.world_size)
    longest = max(sum(value(cost) for cost in planned.costs[rank].values()) for rank in ranks) or 1.0
    colours = {one.table: _COLOURS[i % len(_COLOURS)] for i, one in enumerate(planned.plan.tables)}
    drawn = [f'<text x="{_LEFT}" y="{top + 20}" font-weight="bold">{title}</text>']
    for rank in ranks:
        y, x = top + _TOP + rank * (_BAR + _GAP), float(_LEFT)
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">process {rank}</text>')
        costs = sorted(planned.costs[rank].items(), key=lambda item: -value(item[1]))
        for name, cost in costs:
            width = _WIDTH * value(cost) / longest
            plan = planned.plan.table(name)
            kind = f"{plan.kind} with {plan.num_hot:,} hot rows" if plan.num_hot else plan.kind
            label = f"{escape(name)}, {kind}: {value(cost):.3g}"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colours[name]}" '
                f'stroke="#fff" stroke-width=".5"><title>{label}</title></rect>'
            )
            if width > 7 * len(name) + 4:
                drawn.append(f'<text class="p" x="{x + 4:.1f}" y="{y + 15}">{escape(name)}</text>')
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(value(cost) for _, cost in costs):.3g}</text>')
    return "".join(drawn)
