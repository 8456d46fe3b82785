"""Where a GPU's time goes in steps that are replayed: by kind of kernel, at once on several streams, and in gaps.

Times are those of whole steps: from the first kernel of the second step that was recorded to that of the last one, so
that each step counts with what lies between it and the next. Copies from and to the host run beside the kernels on
engines of their own: they are a kind, and neither fill a gap nor overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from viviane.training.profiling.kernel_kinds import KINDS, is_of_the_host, kind_of
from viviane.training.profiling.timeline import Timeline, Work


@dataclass(frozen=True)
class KindTime:
    """What one kind of kernel took, per step.

    Args:
        kind: of `KINDS`.
        ms: added up over streams.
        alone_ms: in which no kernel of another kind ran.
        launches: kernels and copies.
    """

    kind: str
    ms: float
    alone_ms: float
    launches: float


@dataclass(frozen=True)
class Gap:
    """A stretch in which no kernel ran, per step.

    Args:
        before: the last kernel to end.
        after: the kernel that began then.
        ms: of all gaps between these two.
        times: how many.
    """

    before: str
    after: str
    ms: float
    times: float


@dataclass(frozen=True)
class DeviceTime:
    """A step on the device, on average.

    Args:
        num_steps: whole steps that were looked at.
        step_ms: from the first kernel of a step to that of the next; running_ms + gap_ms.
        running_ms: in which a kernel ran.
        overlap_ms: in which kernels of several streams ran.
        gap_ms: in which none did.
        kinds: in the order of `KINDS`, those that occur.
        gaps: the longest first.
    """

    num_steps: int
    step_ms: float
    running_ms: float
    overlap_ms: float
    gap_ms: float
    kinds: tuple[KindTime, ...]
    gaps: tuple[Gap, ...]


def device_time(timeline: Timeline) -> DeviceTime | None:
    """Return where the device's time went; None: some step has no kernel.

    Args:
        timeline: some steps, of which the first is left out where there are three, and the last marks the end.
    """
    begins = starts(timeline)
    if not begins:
        return None
    kernels = [one for one in timeline.work if not is_of_the_host(one.name)]
    begin, end, count = begins[0], max(one.stop for one in kernels), len(begins)
    if len(begins) > 2:
        begin, end, count = begins[1], begins[-1], len(begins) - 2
    us, times = defaultdict[str, float](float), Counter[str]()
    for one in timeline.work:
        if begin <= one.start < end:
            us[kind_of(one.name)] += one.stop - one.start
            times[kind_of(one.name)] += 1
    running, overlap, alone = _swept([one for one in kernels if begin <= one.start < end], end)
    scale = 1e3 * count
    kinds = (KindTime(kind, us[kind] / scale, alone[kind] / scale, times[kind] / count) for kind in KINDS)
    gaps = (Gap(*names, sum(found) / scale, len(found) / count) for names, found in _gaps(kernels, begin, end).items())
    return DeviceTime(
        count, (end - begin) / scale, running / scale, overlap / scale, (end - begin - running) / scale,
        tuple(one for one in kinds if one.launches), tuple(sorted(gaps, key=lambda one: -one.ms)),
    )  # fmt: skip


def starts(timeline: Timeline) -> list[float]:
    """Return when the first kernel of each step began; empty where a step has none."""
    first: dict[int, float] = {}
    for one in timeline.work:
        if one.step >= 0 and not is_of_the_host(one.name):
            first.setdefault(one.step, one.start)
    return [first[step] for step in range(len(timeline.steps))] if len(first) == len(timeline.steps) else []


def by_kind(timeline: Timeline) -> Timeline:
    """Return the steps with each kernel under its kind, in place of the range that launched it."""
    return replace(timeline, work=tuple(replace(one, path=(kind_of(one.name),)) for one in timeline.work))


def _gaps(kernels: Sequence[Work], begin: float, end: float) -> dict[tuple[str, str], list[float]]:
    """Return the microseconds of each gap by the names of the kernels around it; kernels are in order of start."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    inside = [one for one in kernels if begin <= one.start <= end]  # with the first of the step after
    last = inside[0]
    for one in inside[1:]:
        if one.start > last.stop:
            found[last.name, one.name].append(one.start - last.stop)
        if one.stop > last.stop:
            last = one
    return found


def _swept(kernels: Sequence[Work], end: float) -> tuple[float, float, dict[str, float]]:
    """Return the microseconds with a kernel, with kernels of several streams, and with those of one kind alone."""
    running = overlap = before = 0.0
    alone: dict[str, float] = defaultdict(float)
    kinds, streams = Counter[str](), Counter[int]()
    edges = [(one.start, 1, one) for one in kernels] + [(min(one.stop, end), -1, one) for one in kernels]
    for when, change, one in sorted(edges, key=lambda edge: edge[:2]):
        length, before = when - before, when
        at_work = [kind for kind, count in kinds.items() if count]
        if at_work:
            running += length
        if sum(count > 0 for count in streams.values()) > 1:
            overlap += length
        if len(at_work) == 1:
            alone[at_work[0]] += length
        kinds[kind_of(one.name)] += change
        streams[one.stream] += change
    return running, overlap, alone
