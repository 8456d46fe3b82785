"""A picture of an iteration: what host threads, streams and the network did, one lane each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from viviane.report.scale import Scale, short
from viviane.training.profiling.device_time import starts
from viviane.training.profiling.kernel_kinds import KINDS
from viviane.training.profiling.timeline import Span, Timeline, Work

_LEFT, _RIGHT, _WIDTH, _BAR, _GAP, _TOP = 118, 16, 1080, 20, 12, 40
_COLOURS = ("#2f62c9", "#d9702b", "#1f8a70", "#a63d7d", "#8a6d1b", "#5a4fc0", "#3b8ea5", "#7a7f8c")
_CLASSES = ("read", "to device", "forward", "backward", "update")
"""What has a colour of its own, in this order; all else takes turns with the rest of them."""
_DEPTH = 3


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane; `tone` is the place of its colour."""

    start: float
    stop: float
    tone: int
    name: str
    note: str


def timeline_svg(timeline: Timeline) -> str:
    """Return an SVG of the step of median length: host above, the device's streams below, a colour for each range.

    Names are shown where they fit, and when the mouse rests on a bar. Neighbours that are too narrow to distinguish
    are drawn as one.
    """
    return _picture(timeline, *window(timeline), "one step", _CLASSES)


def replayed_svg(timeline: Timeline) -> str:
    """Return such an SVG of a replayed step, from its first kernel to the next step's, with a colour for each kind.

    The host is ahead of the device: what it does in that time belongs to a later step.

    Args:
        timeline: steps whose kernels are named by their kinds; see `viviane.training.profiling.device_time.by_kind`.
    """
    begins = starts(timeline)
    place = max(0, len(begins) // 2 - 1)
    end = begins[place + 1] if len(begins) > 1 else max(one.stop for one in timeline.work)
    return _picture(timeline, begins[place], end, "one replayed step", KINDS)


def _picture(timeline: Timeline, begin: float, end: float, what: str, classes: Sequence[str]) -> str:
    scale = Scale(begin, end, _LEFT, _WIDTH - _RIGHT)
    tones = _Tones(classes)
    parts: list[str] = []
    y = float(_TOP)
    for title, rows in _lanes(timeline, begin, end, tones):
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(title)}</text>')
        for bars in rows:
            parts += [_drawn(bar, y, scale) for bar in _joined(bars, scale)]
            y += _BAR + 2
        y += _GAP
    head = f"{timeline.device}: {what} of {len(timeline.steps)}, {(end - begin) / 1e3:.3f} ms"
    height = y + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="Where the time of a step went"><style>text{{font:12px sans-serif;fill:#333}}'
        f'.p{{font-size:10px;fill:#fff}}</style><rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>'
        f'<text x="{_LEFT}" y="22" font-weight="bold">{escape(head)}</text>'
        f"{''.join(parts)}{_axis(scale, begin, y)}{tones.legend(y + 30)}</svg>\n"
    )


def window(timeline: Timeline) -> tuple[float, float]:
    """Return begin and end of what is drawn: the step of median length, and what the device did for it."""
    ordered = sorted(timeline.steps[1:] or timeline.steps, key=lambda one: one.stop - one.start)
    step = ordered[len(ordered) // 2]
    own = [one for one in timeline.work if one.step == timeline.steps.index(step)]
    return step.start, max([step.stop, *(one.stop for one in own)])


class _Tones:
    """Colours of ranges by their outermost name."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes
        self.seen: dict[str, int] = {}

    def __call__(self, path: Sequence[str]) -> int:
        name, own = path[0], len(self.classes)
        spare = own + len(set(self.seen) - set(self.classes)) % (len(_COLOURS) - own)
        return self.seen.setdefault(name, self.classes.index(name) if name in self.classes else spare)

    def legend(self, y: float) -> str:
        x, drawn = float(_LEFT), []
        for name, tone in self.seen.items():
            drawn.append(
                f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{_COLOURS[tone]}"/>'
                f'<text x="{x + 15:.0f}" y="{y:.0f}">{escape(name)}</text>'
            )
            x += 32 + 7 * len(name)
        return "".join(drawn)


def _lanes(timeline: Timeline, begin: float, end: float, tones: _Tones) -> Iterable[tuple[str, list[list[Bar]]]]:
    """Yield titles and rows of bars: the step's thread by depth, other threads, then streams."""
    inside = [one for one in timeline.spans if one.path and one.stop > begin and one.start < end]
    own = [one for one in inside if one.thread == timeline.thread]
    rows = [[_span(one, begin, end, tones) for one in own if len(one.path) == depth + 1] for depth in range(_DEPTH)]
    yield "host", [row for row in rows if row]
    others = sorted({one.thread for one in inside} - {timeline.thread})
    for number, thread in enumerate(others, 1):
        yield (
            f"reader thread {number}",
            [[_span(one, begin, end, tones) for one in inside if one.thread == thread and len(one.path) == 1]],
        )
    work = [one for one in timeline.work if one.stop > begin and one.start < end]
    for stream in sorted({one.stream for one in timeline.work}):
        of_stream = [one for one in timeline.work if one.stream == stream]
        bars = [_work(one, begin, end, tones) for one in work if one.stream == stream]
        yield _stream_title(stream, of_stream), [bars]


def _stream_title(stream: int, work: Sequence[Work]) -> str:
    for kind, title in (("exchange", "NCCL"), ("copy", "copies")):
        if 2 * sum(one.stop - one.start for one in work if one.kind == kind) > sum(
            one.stop - one.start for one in work
        ):
            return f"{title}, stream {stream}"
    return f"stream {stream}"


def _span(one: Span, begin: float, end: float, tones: _Tones) -> Bar:
    note = f"{' > '.join(one.path)}: {(one.stop - one.start) / 1e3:.3f} ms"
    return Bar(max(begin, one.start), min(end, one.stop), tones(one.path), one.path[-1], note)


def _work(one: Work, begin: float, end: float, tones: _Tones) -> Bar:
    note = f"{' > '.join(one.path)}: {one.name[:80]}, {one.stop - one.start:.1f} us"
    return Bar(max(begin, one.start), min(end, one.stop), tones(one.path), one.path[-1], note)


def _joined(bars: Iterable[Bar], scale: Scale) -> list[Bar]:
    """Join neighbours of one colour whose distance cannot be seen, where one of them is too narrow to be seen, too."""
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        last = found[-1] if found else None
        if last is not None and last.tone == bar.tone and scale(bar.start) - scale(last.stop) < 0.4:
            narrow = scale(bar.stop) - scale(bar.start) < 2 or scale(last.stop) - scale(last.start) < 2
            if narrow or last.name == bar.name:
                note = last.note if last.note.endswith("more") else f"{last.note} and more"
                found[-1] = Bar(last.start, max(last.stop, bar.stop), bar.tone, last.name, note)
                continue
        found.append(bar)
    return found


def _drawn(bar: Bar, y: float, scale: Scale) -> str:
    x, width = scale(bar.start), max(scale(bar.stop) - scale(bar.start), 0.3)
    drawn = (
        f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[bar.tone]}" '
        f'stroke="#fff" stroke-width=".3">'
        f"<title>{escape(bar.note)}</title></rect>"
    )
    if width > 6 * len(bar.name) + 6:
        drawn += f'<text class="p" x="{x + 3:.1f}" y="{y + 14:.0f}">{escape(bar.name)}</text>'
    return drawn


def _axis(scale: Scale, begin: float, y: float) -> str:
    inner = Scale(0.0, (scale.high - begin) / 1e3, scale.start, scale.stop)
    return "".join(
        f'<line x1="{inner(tick):.1f}" x2="{inner(tick):.1f}" y1="{_TOP - 8}" y2="{y - 4:.0f}" stroke="#0002"/>'
        f'<text x="{inner(tick):.1f}" y="{y + 8:.0f}" text-anchor="middle">{short(tick)} ms</text>'
        for tick in inner.ticks(8)
    )
