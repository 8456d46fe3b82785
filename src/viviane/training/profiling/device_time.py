"""Device time of replayed steps: by kind of kernel, overlapped across streams, and in gaps.

Times are those of complete steps: from the first kernel of the second recorded step to the first kernel of the last
one, so that each step includes the gap before the next. Copies from and to the host run on copy engines concurrently
with kernels: they are a kind of their own, and neither fill a gap nor count as overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from viviane.training.profiling.kernel_kinds import KINDS, is_of_the_host, kind_of
from viviane.training.profiling.timeline import Timeline, Work


@dataclass(frozen=True)
class KindTime:
    """Device time of one kind of kernel, per step.

    Args:
        kind: one of `KINDS`.
        ms: sum over streams.
        alone_ms: time in which no kernel of another kind ran.
        launches: number of kernels and copies.
    """

    kind: str
    ms: float
    alone_ms: float
    launches: float


@dataclass(frozen=True)
class Gap:
    """Time in which no kernel ran, per step.

    Args:
        before: the last kernel to end before the gap.
        after: the kernel that ended the gap.
        ms: sum of all gaps between these two kernels.
        times: number of such gaps.
    """

    before: str
    after: str
    ms: float
    times: float


@dataclass(frozen=True)
class DeviceTime:
    """Mean device time of a step.

    Args:
        num_steps: number of complete steps in the mean.
        step_ms: from the first kernel of a step to that of the next; running_ms + gap_ms.
        running_ms: time in which at least one kernel ran.
        overlap_ms: time in which kernels ran on several streams.
        gap_ms: time in which no kernel ran.
        kinds: the kinds that occur, in the order of `KINDS`.
        gaps: the gaps, longest first.
    """

    num_steps: int
    step_ms: float
    running_ms: float
    overlap_ms: float
    gap_ms: float
    kinds: tuple[KindTime, ...]
    gaps: tuple[Gap, ...]


def device_time(timeline: Timeline) -> DeviceTime | None:
    """Return the device time of the steps; None if a step has no kernel.

    Args:
        timeline: some steps; the first is dropped if there are at least three, and the last only marks the end.
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
    """Return the start of the first kernel of each step; empty if a step has none."""
    first: dict[int, float] = {}
    for one in timeline.work:
        if one.step >= 0 and not is_of_the_host(one.name):
            first.setdefault(one.step, one.start)
    return [first[step] for step in range(len(timeline.steps))] if len(first) == len(timeline.steps) else []


def by_kind(timeline: Timeline) -> Timeline:
    """Return the steps with the kind of each kernel instead of the range that launched it."""
    return replace(timeline, work=tuple(replace(one, path=(kind_of(one.name),)) for one in timeline.work))


def _gaps(kernels: Sequence[Work], begin: float, end: float) -> dict[tuple[str, str], list[float]]:
    """Return the microseconds of each gap by the names of the kernels around it; kernels are sorted by start."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    inside = [one for one in kernels if begin <= one.start <= end]  # including the first of the next step
    last = inside[0]
    for one in inside[1:]:
        if one.start > last.stop:
            found[last.name, one.name].append(one.start - last.stop)
        if one.stop > last.stop:
            last = one
    return found


def _swept(kernels: Sequence[Work], end: float) -> tuple[float, float, dict[str, float]]:
    """Return the microseconds with any kernel, with kernels on several streams, and by kind with no other kind."""
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
