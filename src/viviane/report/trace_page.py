"""The page of a trace: the picture, the ranges, the longest kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from viviane.core.files import write_bytes_atomic
from viviane.report import html
from viviane.report.timeline import replayed_svg, timeline_svg
from viviane.training.profiling.device_time import DeviceTime, KindTime
from viviane.training.profiling.timeline import Row
from viviane.training.profiling.trace import Recorded, Replayed

if TYPE_CHECKING:
    from markupsafe import Markup

PICTURE_FILE: Final = "trace.svg"
REPLAYED_PICTURE_FILE: Final = "trace_recorded.svg"
PAGE_FILE: Final = "trace.html"
_GAPS: Final = 8


def write_trace_page(recorded: Recorded, folder: str | Path) -> Path:
    """Write trace.svg, and trace.html which shows it beside the figures, into a folder; returns the page.

    Where steps were replayed, trace_recorded.svg shows one, and stands first on the page.
    The page holds its style and its drawing: it opens without a network and can be mailed.
    """
    target = Path(folder)
    write_bytes_atomic(target / PICTURE_FILE, timeline_svg(recorded.timeline).encode())
    if recorded.replayed is not None:
        write_bytes_atomic(target / REPLAYED_PICTURE_FILE, replayed_svg(recorded.replayed.timeline).encode())
    write_bytes_atomic(target / PAGE_FILE, render(recorded).encode())
    return target / PAGE_FILE


def cells(recorded: Recorded, row: Row) -> list[str]:
    """Return the table cells of a range: name, host ms, device ms, share of the step, GB/s, launches, idle ms."""
    timeline = recorded.timeline
    device = bool(timeline.work)
    taken = row.device_ms if device else row.host_ms
    speed = ""
    if row.num_bytes > 1e6 and row.device_ms:  # of small copies the time is not that of their bytes
        speed = f"{row.num_bytes / row.device_ms / 1e6:.1f}"
    elif row.path == ("read",) and row.host_ms:
        speed = f"{recorded.batch_bytes / row.host_ms / 1e6:.1f}"
    return [
        "  " * (len(row.path) - 1) + row.path[-1],
        f"{row.host_ms:.3f}",
        f"{row.device_ms:.3f}" if device else "",
        f"{taken / timeline.step_ms:.1%}",
        speed,
        f"{row.launches:.0f}" if device else "",
        f"{row.idle_ms:.3f}" if device else "",
    ]


HEADINGS: Final = ("range", "host ms", "device ms", "share", "GB/s", "launches", "device idle ms")
OF_A_DEVICE: Final = ("device ms", "launches", "device idle ms")


KIND_HEADINGS: Final = ("kind of kernel", "device ms", "share", "alone ms", "launches")


def kind_cells(time: DeviceTime, row: KindTime) -> list[str]:
    """Return the table cells of a kind of kernel: name, device ms, share of the step, ms alone, launches."""
    return [row.kind, f"{row.ms:.3f}", f"{row.ms / time.step_ms:.1%}", f"{row.alone_ms:.3f}", f"{row.launches:.0f}"]


def gap_lines(time: DeviceTime) -> list[list[str]]:
    """Return the longest gaps of a step: ms, how many, the kernels around them."""
    return [
        [f"{one.ms:.4f}", f"{one.times:.1f}", one.before[:60], one.after[:60]] for one in time.gaps[:_GAPS]
    ]  # fmt: skip


def replayed_summary(replayed: Replayed) -> str:
    """Return one line about what a replayed step took on the device."""
    time, steps = replayed.time, len(replayed.timeline.steps)
    few = f"; only {replayed.num_replays} of {steps} steps were replays" if replayed.num_replays < steps else ""
    return (
        f"replayed, with the profiler: {time.step_ms:.3f} ms a step; kernels run {time.running_ms:.3f} ms, of which "
        f"{time.overlap_ms:.3f} ms on several streams, and none runs {time.gap_ms:.3f} ms{few}"
    )


def summary(recorded: Recorded) -> str:
    """Return one line about what a step took."""
    timeline, rows = recorded.timeline, recorded.batch_size
    busy = f", of which the device is at work {timeline.busy_ms:.3f} ms" if timeline.work else ""
    plain, python = ("", "") if recorded.replayed is None else (", replayed", "from Python ")
    return (
        f"{recorded.plain_ms:.3f} ms a step of {rows:,} rows ({rows / recorded.plain_ms * 1e3:,.0f} samples/s){plain}; "
        f"{python}{timeline.step_ms:.3f} ms with the profiler{busy}"
    )


def render(recorded: Recorded) -> str:
    """Return the whole page as HTML."""
    timeline = recorded.timeline
    rows = [cells(recorded, row) for row in timeline.rows()]
    kernels = [(name[:100], f"{ms:.4f}", f"{times:.1f}") for name, ms, times in timeline.kernels(20)]
    body = html.part(
        "trace",
        "" if recorded.replayed is None else _replayed(recorded.replayed),
        html.trusted(timeline_svg(timeline)),
        _table(HEADINGS, rows),
        _table(("kernel", "ms a step", "launches"), kernels) if kernels else "",
    )
    return html.page("Trace", f"{timeline.device}: {summary(recorded)}", body, heading="Where a step's time goes")


def _replayed(replayed: Replayed) -> Markup:
    """Return the part of the page that shows replayed steps, and the heading of what follows it."""
    kinds = [kind_cells(replayed.time, row) for row in replayed.time.kinds]
    gaps = [(f"{row[2]} \N{RIGHTWARDS ARROW} {row[3]}", *row[:2]) for row in gap_lines(replayed.time)]
    return html.part(
        "replayed_step",
        replayed_summary(replayed),
        html.trusted(replayed_svg(replayed.timeline)),
        _table(KIND_HEADINGS, kinds),
        _table(("no kernel runs between", "ms a step", "times"), gaps) if gaps else "",
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    indented = [(row[0].replace("  ", "\N{EM SPACE}"), *row[1:]) for row in rows]
    return html.part("table", headings, indented, panel=True)
