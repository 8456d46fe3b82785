"""Analysis of a profiler trace: the range of each kernel, and the time of a step by range.

Times are microseconds of the trace's clock. A kernel belongs to the innermost range in which it was launched, whichever
thread launched it: autograd's thread launches backward's kernels, within the step's range "backward".
"""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import DataError, DataNotFoundError
from viviane.core.json_files import expected_form, json_object, parse_json, read_json
from viviane.core.ranges import PREFIX

_MOST_BYTES: Final = 2 << 30  # size of a decompressed trace
STEP: Final = "step"
_DEVICE_KINDS: Final = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "kernel"}
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
_TORCH_RANGES: Final = {"Optimizer.step#": "dense optimizer"}  # torch names these itself

Names = tuple[str, ...]


@dataclass(frozen=True)
class Span:
    """A named range of a host thread.

    Args:
        path: names of the enclosing ranges, then its own; () for a step.
        start, stop: in microseconds.
        thread: the thread that ran it.
    """

    path: Names
    start: float
    stop: float
    thread: int


@dataclass(frozen=True)
class Work:
    """A kernel, copy or collective on a device.

    Args:
        name: name of the kernel.
        kind: "kernel", "copy" or "exchange".
        start, stop: in microseconds.
        stream: number of the stream.
        path: path of the range that launched it; ("other",): the step itself; ("elsewhere",): unknown.
        step: index of the step in which it was launched, or -1.
        num_bytes: size of a copy.
    """

    name: str
    kind: str
    start: float
    stop: float
    stream: int
    path: Names
    step: int
    num_bytes: int = 0


@dataclass(frozen=True)
class Row:
    """Time of one range, per step.

    Args:
        path: path of the range.
        host_ms: on the step's thread, including nested ranges.
        device_ms: sum over streams of the kernels that it launched.
        idle_ms: time in which the device was idle before one of its kernels.
        launches: number of kernels and copies.
        num_bytes: size of its copies.
    """

    path: Names
    host_ms: float
    device_ms: float
    idle_ms: float
    launches: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """Some steps of training.

    Args:
        device: description of the device.
        steps: steps of the step's thread, in order.
        spans: ranges of all threads; those of the step's thread have paths.
        work: work on the device, by start; empty on a CPU.
    """

    device: str
    steps: tuple[Span, ...]
    spans: tuple[Span, ...]
    work: tuple[Work, ...]

    @classmethod
    def load(cls, path: str | Path, device: str = "") -> Timeline:
        """Read a trace that torch.profiler wrote, with the ranges of `record_trace`.

        Raises:
            DataError: the file contains no step.
        """
        file = Path(path)
        content = json_object(_trace(file), where=str(path), error=DataError)
        with expected_form(str(path), DataError):
            events = [one for one in content["traceEvents"] if one.get("ph") == "X"]
            spans = _nested(one for one in map(_span, events) if one is not None)
        steps = tuple(one for one in spans if not one.path)
        if not steps:
            raise DataError("the trace contains no step", where=str(path), fix="record it with `viviane trace`")
        own = [one for one in spans if one.thread == steps[0].thread]
        return cls(device, steps, tuple(spans), tuple(_work(events, steps, own)))

    @property
    def thread(self) -> int:
        """The thread that ran the steps."""
        return self.steps[0].thread

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, from its first call to the end of its last kernel."""
        end = max([self.steps[-1].stop, *(one.stop for one in self.work if one.step >= 0)])
        return (end - self.steps[0].start) / len(self.steps) / 1e3

    @property
    def busy_ms(self) -> float:
        """Milliseconds of a step in which the device was busy."""
        return sum(stop - start for start, stop in busy(self.work)) / len(self.steps) / 1e3

    def rows(self) -> list[Row]:
        """Return the ranges of the step's thread in the order of a step, each followed by those within it."""
        totals: dict[Names, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0, 0.0])
        for one in self.spans:
            if one.path and one.thread == self.thread:
                totals[one.path][0] += one.stop - one.start
        end = self.work[0].start if self.work else 0.0
        for work in self.work:
            idle, end = max(0.0, work.start - end), max(end, work.stop)
            for depth in range(1, len(work.path) + 1):  # nested ranges count for the enclosing ones, too
                values = totals[work.path[:depth]]
                for i, number in enumerate((work.stop - work.start, idle, 1, work.num_bytes), 1):
                    values[i] += number
        count = len(self.steps)
        return [
            Row(path, v[0] / count / 1e3, v[1] / count / 1e3, v[2] / count / 1e3, v[3] / count, v[4] / count)
            for path, v in ((path, totals[path]) for path in _in_order(totals))
        ]

    def kernels(self, count: int = 10) -> list[tuple[str, float, float]]:
        """Return the names of the kernels that took longest, their milliseconds and launches per step."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for one in self.work:
            sums[one.name][0] += (one.stop - one.start) / 1e3
            sums[one.name][1] += 1
        found = sorted(sums.items(), key=lambda item: -item[1][0])[:count]
        return [(name, ms / len(self.steps), times / len(self.steps)) for name, (ms, times) in found]


def busy(work: Iterable[Work]) -> list[tuple[float, float]]:
    """Return the intervals, in order, in which at least one stream is busy.

    Example:
        >>> busy([Work("a", "kernel", 0, 2, 7, (), 0), Work("b", "copy", 1, 3, 8, (), 0)])
        [(0, 3)]
    """
    found: list[tuple[float, float]] = []
    for one in sorted(work, key=lambda one: one.start):
        if found and one.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], one.stop))
        else:
            found.append((one.start, one.stop))
    return found


def _span(event: dict[str, Any]) -> Span | None:
    if event.get("cat") != "user_annotation":
        return None
    name = str(event["name"])
    own = name[len(PREFIX) :] if name.startswith(PREFIX) else None
    own = own or next((ours for theirs, ours in _TORCH_RANGES.items() if name.startswith(theirs)), None)
    if own is None:
        return None
    start = float(event["ts"])
    return Span((own,), start, start + float(event["dur"]), int(event["tid"]))


def _nested(spans: Iterable[Span]) -> list[Span]:
    """Prefix each range with the names of its enclosing ranges; the name of the step is omitted."""
    found: list[Span] = []
    around: list[Span] = []
    for one in sorted(spans, key=lambda one: (one.thread, one.start, -one.stop)):
        while around and (around[-1].thread != one.thread or around[-1].stop <= one.start):
            around.pop()
        outer = around[-1].path if around else ()
        around.append(Span(() if one.path == (STEP,) else (*outer, *one.path), one.start, one.stop, one.thread))
        found.append(around[-1])
    return found


def _work(events: Iterable[dict[str, Any]], steps: Sequence[Span], own: Sequence[Span]) -> list[Work]:
    """Return the work of the device, each item with the range that launched it."""
    kept: list[dict[str, Any]] = []
    launched: dict[int, float] = {}
    for event in events:
        if event.get("cat") in _DEVICE_KINDS:
            kept.append(event)
        elif event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = float(event["ts"])
    starts, begins = [one.start for one in own], [one.start for one in steps]
    found: list[Work] = []
    last: dict[int, tuple[Names, int]] = {}  # by stream
    for event in sorted(kept, key=lambda event: float(event["ts"])):
        args, name, start = event["args"], str(event["name"]), float(event["ts"])
        stream, when = int(args.get("stream", 0)), launched.get(args.get("correlation", -1))
        # The profiler does not record every launch: then assume the range of the previous work on the stream.
        path, step = last.get(stream, (("elsewhere",), -1))
        if when is not None:
            path, step = _innermost(own, starts, when) or ("other",), bisect_right(begins, when) - 1
        last[stream] = path, step
        kind = "exchange" if name.startswith("nccl") else _DEVICE_KINDS[event["cat"]]
        stop, num_bytes = start + float(event["dur"]), int(args.get("bytes", 0))
        found.append(Work(name, kind, start, stop, stream, path, step, num_bytes))
    return found


def _innermost(own: Sequence[Span], starts: Sequence[float], when: float) -> Names:
    """Return the path of the range with the latest start that contains a time."""
    for i in range(bisect_right(starts, when) - 1, -1, -1):
        if own[i].stop >= when:
            return own[i].path
        if not own[i].path:
            break
    return ()


def _in_order(totals: Iterable[Names]) -> list[Names]:
    """Return paths in depth-first order: each range before nested ones, ranges in order of first occurrence."""
    first = {path: i for i, path in enumerate(totals)}
    return sorted(first, key=lambda path: [first.get(path[: depth + 1], 0) for depth in range(len(path))])


def _trace(file: Path) -> Any:
    """Read the JSON of a trace, compressed or not."""
    if file.suffix != ".gz":
        return read_json(file, error=DataError, max_bytes=_MOST_BYTES)
    try:
        with gzip.open(file) as stream:
            data = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise DataNotFoundError("trace not found", where=str(file)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("the trace is truncated, altered or not gzip", where=str(file), value=str(error)) from error
    return parse_json(data, where=str(file), error=DataError, max_bytes=_MOST_BYTES)
