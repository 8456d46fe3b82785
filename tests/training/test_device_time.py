"""Replayed steps read back from a trace whose numbers were worked out by hand, and what is recorded where."""

import ast
import gzip
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click_model import SCHEMA, ClickModel, make_dataset
from replayed_on_cpu import let_replay, replays

import viviane.ops
from viviane.config import Adam, Solver
from viviane.report.timeline import replayed_svg
from viviane.report.trace_page import gap_lines, kind_cells, replayed_summary, write_trace_page
from viviane.training import Trainer
from viviane.training.graph import captured
from viviane.training.graph.capture_rules import _module_ineligible_reasons
from viviane.training.profiling import trace
from viviane.training.profiling.device_time import by_kind, device_time, starts
from viviane.training.profiling.kernel_kinds import KINDS, OWN_KERNELS, kind_of
from viviane.training.profiling.timeline import Timeline

__all__ = ["replays"]

# A step of 100 us, on streams 7 (main), 8 (a branch) and 9 (copies); offsets from its first kernel:
#   lookup 0-20 | product 25-60, next to it check 30-40 and sort 50-70 on 8 | NCCL 70-80 | nothing until update 85-95
# The host copies the next batch at 60-90 on 9. Gaps: 20-25, 80-85, 95-100; two streams: 30-40, 50-60.
KERNELS = [
    ("gather_kernel", 7, 0, 20),
    ("nvjet_hsh_128x256", 7, 25, 35),
    ("check_kernel", 8, 30, 10),
    ("DeviceRadixSortOnesweepKernel", 8, 50, 20),
    ("ncclDevKernel_AllReduce", 7, 70, 10),
    ("Memcpy HtoD (Pinned -> Device)", 9, 60, 30),
    ("span_kernel", 7, 85, 10),
]


def replayed_trace(num_steps: int, late: int = 0) -> dict:
    """Steps whose launches all have the correlation of their graph; the first takes 40 us longer: `late` gaps it."""
    events = []
    for step in range(num_steps):
        begin = 1000 + 100 * step + (late if step else 0)
        host = {"ph": "X", "cat": "user_annotation", "tid": 1}
        events.append({**host, "name": "viviane: step", "ts": 20 * step, "dur": 18})
        events.append({**host, "name": "viviane: replay", "ts": 20 * step + 5, "dur": 10})
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "tid": 1}
        events.append({**launch, "ts": 20 * step + 8, "dur": 2, "args": {"correlation": step}})
        for name, stream, start, length in KERNELS:
            cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            args = {"correlation": step, "stream": stream}
            events.append({"ph": "X", "cat": cat, "name": name, "ts": begin + start, "dur": length, "args": args})
    return {"traceEvents": events}


def loaded(tmp_path, **given: int) -> Timeline:
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump(replayed_trace(**given), out)
    return Timeline.load(file, "a GPU")


@pytest.mark.parametrize("late", [0, 40])
def test_whole_steps_by_kind_with_gaps_and_overlap(tmp_path, late):
    timeline = loaded(tmp_path, num_steps=4, late=late)
    assert starts(timeline) == [1000, 1100 + late, 1200 + late, 1300 + late]
    time = device_time(timeline)
    assert time.num_steps == 2  # what the first one takes longer is left out
    figures = (time.step_ms, time.running_ms, time.overlap_ms, time.gap_ms)
    assert figures == pytest.approx((0.100, 0.085, 0.020, 0.015))
    found = {one.kind: (one.ms, one.alone_ms, one.launches) for one in time.kinds}
    assert list(found) == [kind for kind in KINDS if kind in found]
    assert found == {
        "matrix products": pytest.approx((0.035, 0.015, 1)),  # 25-30 and 40-50
        "lookups": pytest.approx((0.020, 0.020, 1)),
        "updates": pytest.approx((0.010, 0.010, 1)),
        "sorts": pytest.approx((0.020, 0.010, 1)),  # 60-70: a copy of the host is next to it
        "exchanges": pytest.approx((0.010, 0.010, 1)),
        "copies": pytest.approx((0.030, 0, 1)),
        "others": pytest.approx((0.010, 0, 1)),
    }
    assert {(one.before, one.after): (one.ms, one.times) for one in time.gaps} == {
        ("gather_kernel", "nvjet_hsh_128x256"): pytest.approx((0.005, 1)),
        ("ncclDevKernel_AllReduce", "span_kernel"): pytest.approx((0.005, 1)),
        ("span_kernel", "gather_kernel"): pytest.approx((0.005, 1)),
    }


def test_fewer_than_three_steps_are_taken_as_they_are(tmp_path):
    one = device_time(loaded(tmp_path, num_steps=1))
    assert (one.num_steps, one.step_ms, one.gap_ms) == pytest.approx((1, 0.095, 0.010))
    two = device_time(loaded(tmp_path, num_steps=2))
    assert (two.num_steps, two.step_ms, two.gap_ms) == pytest.approx((2, 0.0975, 0.0125))


def test_no_kernels_have_no_device_time(tmp_path):
    file = tmp_path / "trace.json"
    events = [one for one in replayed_trace(2)["traceEvents"] if one["cat"] == "user_annotation"]
    file.write_text(json.dumps({"traceEvents": events}))
    assert device_time(Timeline.load(file)) is None


def test_kinds_of_names():
    names = {
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "matrix products",
        "void at::native::vectorized_gather_kernel<16, long>": "lookups",
        "void at::native::index_elementwise_kernel": "lookups",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel": "updates",
        "void cub::DeviceRadixSortOnesweepKernel<...>": "sorts",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exchanges",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy": "copies",
        "Memcpy DtoD (Device -> Device)": "copies",
        "Memset (Device)": "others",
        "void at::native::reduce_kernel<512, 1>": "others",
        "move_kernel": "updates",
    }
    assert {name: kind_of(name) for name in names} == names
    assert set(OWN_KERNELS.values()) <= set(KINDS)


def test_every_kernel_of_ours_has_a_kind():
    files = list(Path(viviane.ops.__file__).parent.rglob("*.py"))
    functions = [one for file in files for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)]
    jitted = [one for one in functions if any("triton" in ast.unparse(how) for how in one.decorator_list)]
    found = {one.name for one in jitted if one.name.endswith("_kernel")}
    assert len(found) > 30
    in_cuda = {
        name for file in files for name in re.findall(r'extern "C" __global__ .*\) (\w+_kernel)\(', file.read_text())
    }
    assert in_cuda == {"tile_product_kernel"}
    assert found | in_cuda == set(OWN_KERNELS)


def test_the_picture_shows_a_step_by_kinds(tmp_path):
    drawing = replayed_svg(by_kind(loaded(tmp_path, num_steps=4)))
    ET.fromstring(drawing)
    for title in ("one replayed step of 4, 0.100 ms", "stream 7", "stream 8", "copies, stream 9", ">matrix products<"):
        assert title in drawing


def trainer_of(graph, **settings):
    solver = Solver(batch_size=32, device="cpu", cuda_graph=graph, num_threads=1, **settings)
    return let_replay(Trainer(ClickModel(), SCHEMA, solver, Adam(), progress=False, tensorboard=False))


@pytest.fixture
def no_hooks(replays, monkeypatch):
    """Let hooks be what prevents a replay, as they do on a GPU."""

    def reason(step):
        return next(_module_ineligible_reasons(step.module, trusts=True), None)

    monkeypatch.setattr(captured, "ineligible_reason", reason)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Rows whose bags are empty, so that batches have one shape: five whole batches and a short one."""
    import click_model

    plain = click_model.columns
    monkeypatch.setattr(click_model, "columns", lambda n, seed: {**plain(n, seed), "seen": [[]] * n})
    return make_dataset(tmp_path / "rows", 170)


@pytest.fixture
def profiled(monkeypatch):
    """Run steps without the profiler, note whether they were replayed, and write a trace that was made by hand."""
    seen = []

    def run(step, count, file, device):
        steps = run.trainer.stepper.captured
        before = steps.num_replays
        for _ in range(count):
            step()
        seen.append((file.name, count, steps.num_replays - before))
        with gzip.open(file, "wt") as out:
            json.dump(replayed_trace(count), out)

    monkeypatch.setattr(trace, "profile_steps", run)
    return run, seen


def test_where_training_replays_replays_are_recorded_and_then_steps_from_python(no_hooks, rows, profiled, tmp_path):
    run, seen = profiled
    run.trainer = trainer = trainer_of("auto")
    recorded = trace.record_trace(trainer, rows, tmp_path / "out", steps=9)
    assert seen == [("trace_recorded.json.gz", 11, 11), ("trace.json.gz", 9, 0)]
    assert (recorded.replayed.num_replays, recorded.replayed.time.num_steps) == (11, 9)
    assert recorded.replayed.file.name == "trace_recorded.json.gz"
    assert {one.path for one in recorded.replayed.timeline.work} == {(kind,) for kind in KINDS}
    assert trainer.step == 5 + 9 + 11 + 9
    page = write_trace_page(recorded, tmp_path / "out").read_text()
    assert page.index("A replayed step") < page.index("Longest gaps") < page.index("The same step from Python")
    ET.fromstring((tmp_path / "out" / "trace_recorded.svg").read_text())
    time = recorded.replayed.time
    assert kind_cells(time, time.kinds[0]) == ["matrix products", "0.035", "35.0%", "0.015", "1"]
    assert gap_lines(time)[0][0] == "0.0050"
    assert replayed_summary(recorded.replayed) == (
        "replayed, with the profiler: 0.100 ms a step; kernels run 0.085 ms, of which 0.020 ms on several streams, "
        "and none runs 0.015 ms"
    )


def test_where_no_step_is_replayed_there_is_one_trace(replays, rows, profiled, tmp_path):
    run, seen = profiled
    run.trainer = trainer = trainer_of(False)
    assert trace.record_trace(trainer, rows, tmp_path / "out", steps=2).replayed is None
    assert seen == [("trace.json.gz", 2, 0)]
    assert trainer.step == 5 + 2 + 2
    assert not (tmp_path / "out" / "trace_recorded.json.gz").exists()


def test_waiting_for_a_replay_comes_to_an_end(replays, profiled, tmp_path):
    run, seen = profiled
    run.trainer = trainer = trainer_of("auto")
    data = make_dataset(tmp_path / "rows", 3200)  # bags make every batch a shape of its own
    assert trace.record_trace(trainer, data, tmp_path / "out", steps=2).replayed is None
    assert seen == [("trace.json.gz", 2, 0)]
    assert trainer.step == 40 + 2 + 2
