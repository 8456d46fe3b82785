"""A profiler's trace read back, on a trace whose numbers were worked out by hand."""

import json

import pytest

from viviane.core.errors import DataError
from viviane.report.timeline import timeline_svg, window
from viviane.training.profiling.timeline import Timeline, Work, busy


def host(name: str, start: float, length: float, thread: int = 1) -> dict:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": length, "tid": thread}


def launch(number: int, when: float, thread: int = 1) -> dict:
    args = {"correlation": number}
    return {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": when, "dur": 1, "tid": thread, "args": args}


def work(number: int, start: float, length: float, *, stream: int = 7, name: str = "kernel", **more: object) -> dict:
    kind = more.pop("cat", "kernel")
    args = {"correlation": number, "stream": stream, **more}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "tid": stream, "args": args}


# Two steps of 100 us. In each: read 0-10, forward 10-40 with a lookup 12-20 in it, backward 40-70 (launched by another
# thread), optimizer 70-90; kernels end 20 us after the host.
STEP = [
    host("viviane: step", 0, 95),
    host("viviane: read", 0, 10),
    host("viviane: forward", 10, 30),
    host("viviane: lookup emb", 12, 8),
    host("viviane: backward", 40, 30),
    host("Optimizer.step#SGD.step", 70, 20),
    host("aten::mm", 71, 2),
    host("viviane: decode", 5, 50, thread=2),
    launch(0, 5),
    work(0, 6, 20, stream=9, cat="gpu_memcpy", name="Memcpy HtoD", bytes=2_000_000),
    launch(1, 13),
    work(1, 30, 10),
    launch(2, 30),
    work(2, 42, 8),
    launch(3, 45, thread=3),
    work(3, 55, 25),
    launch(4, 50, thread=3),
    work(4, 60, 30, stream=11, name="ncclDevKernel_AllReduce"),
    work(5, 90, 2, stream=11, name="unseen"),
    launch(6, 92),
    work(6, 95, 5),
]


@pytest.fixture
def timeline(tmp_path) -> Timeline:
    events = []
    for i in range(2):
        for one in STEP:
            later = {**one, "ts": one["ts"] + 100 * i}
            if "args" in one:
                later["args"] = {**one["args"], "correlation": one["args"]["correlation"] + 10 * i}
            events.append(later)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return Timeline.load(file, "a device")


def test_rows_are_ranges_in_order_with_what_they_launched(timeline):
    rows = {row.path: row for row in timeline.rows()}
    assert list(rows) == [
        ("read",), ("forward",), ("forward", "lookup emb"), ("backward",), ("dense optimizer",), ("other",),
    ]  # fmt: skip
    values = {path[-1]: (row.host_ms, row.device_ms, row.launches) for path, row in rows.items()}
    assert values["read"] == pytest.approx((0.010, 0.020, 1))
    assert values["forward"] == pytest.approx((0.030, 0.018, 2))  # the lookup's kernel is forward's, too
    assert values["lookup emb"] == pytest.approx((0.008, 0.010, 1))
    assert values["backward"] == pytest.approx((0.030, 0.057, 3))  # with the one whose launch was not seen
    assert values["dense optimizer"] == pytest.approx((0.020, 0, 0))
    assert values["other"] == pytest.approx((0, 0.005, 1))
    assert rows[("read",)].num_bytes == 2_000_000


def test_idle_time_belongs_to_the_kernel_that_was_waited_for(timeline):
    idle = {row.path[-1]: row.idle_ms for row in timeline.rows()}
    # Of two steps: 26-30 before the lookup, 40-42 before forward's own, 50-55 before backward, 92-95, and 100-106 once.
    expected = {"read": 0.003, "lookup emb": 0.004, "forward": 0.006, "backward": 0.005, "other": 0.003}
    assert {name: idle[name] for name in expected} == pytest.approx(expected)
    assert timeline.busy_ms == pytest.approx((2 * (20 + 10 + 8 + 37 + 5)) / 2 / 1e3)
    assert timeline.step_ms == pytest.approx(0.100)  # 200 us from the first call to the last kernel's end


def test_kinds_and_longest_kernels(timeline):
    assert {one.name: one.kind for one in timeline.work} == {
        "Memcpy HtoD": "copy", "kernel": "kernel", "ncclDevKernel_AllReduce": "exchange", "unseen": "kernel",
    }  # fmt: skip
    assert timeline.kernels(1) == [("kernel", pytest.approx(0.048), 4)]


def test_the_picture_has_a_lane_for_each_thread_and_stream(timeline):
    drawing = timeline_svg(timeline)
    for title in ("host", "reader thread 1", "stream 7", "copies, stream 9", "NCCL, stream 11", ">lookup emb<"):
        assert title in drawing
    assert window(timeline) == (100, 200)
    assert drawing.count("<svg") == drawing.count("</svg>") == 1


def test_streams_at_work_together_are_busy_once():
    def one(start: float, stop: float, stream: int) -> Work:
        return Work("k", "kernel", start, stop, stream, (), 0)

    assert busy([]) == []
    assert busy([one(5, 6, 1), one(0, 3, 1), one(1, 2, 2), one(3, 4, 2)]) == [(0, 4), (5, 6)]


def test_a_trace_of_something_else_is_refused(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"traceEvents": [host("aten::mm", 0, 1)]}))
    with pytest.raises(DataError, match="contains no step"):
        Timeline.load(file)
