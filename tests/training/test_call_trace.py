"""How many of our functions a steady CPU step of DCN calls, and in how many files: a bound on host time."""

import sys
from pathlib import Path

import numpy as np
import pytest

import viviane as vv
from viviane.batch import Batch
from viviane.zoo import DCN

ROOT = str(Path(vv.__file__).parent)
LIMITS = {"replayed": (199, 35), "eager": (243, 44)}  # calls, files
FORBIDDEN = ("training/graph/", "ops/capture.py", "parallel/")
WITHOUT_NAME = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


@pytest.fixture(scope="module", params=LIMITS)
def calls(request):
    """(file, function) of every call into the package during one `train_step` of DCN at Criteo's width."""
    schema = vv.Schema(
        labels=[{"name": "y"}],
        dense=[{"name": f"x{i}"} for i in range(13)],
        categorical=[{"name": f"c{i}", "num_ids": 200} for i in range(26)],
    )
    rng = np.random.default_rng(0)
    columns = {"y": rng.integers(0, 2, 512)}
    columns |= {one.name: rng.normal(size=512).astype("float32") for one in schema.dense}
    columns |= {one.name: rng.integers(3, 200, 512) for one in schema.categorical}
    batch = Batch.from_columns(schema, columns)
    graph = "auto" if request.param == "replayed" else False
    model = vv.Model(vv.Solver(batch_size=512, device="cpu", num_threads=1, cuda_graph=graph), schema)
    model.add(DCN())
    model.compile(vv.Adam())
    trainer = model.trainer
    for _ in range(8):  # plans, optimizer state and buffers are made in the first steps, which are then recorded
        trainer.train_step(batch)
    found = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in WITHOUT_NAME:
            found.append((code.co_filename[len(ROOT) + 1 :], code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        trainer.train_step(batch)
    finally:
        sys.setprofile(before)
    return request.param, found


def test_a_step_makes_few_calls(calls):
    kind, calls = calls
    most_calls, most_files = LIMITS[kind]
    assert len(calls) <= most_calls, f"{len(calls)} calls of {len(set(calls))} functions"
    files = {file for file, _ in calls}
    assert len(files) <= most_files, f"{len(files)} files: {', '.join(sorted(files))}"


def test_a_cpu_step_calls_nothing_of_graphs_and_sharding(calls):
    wrong = sorted({(file, name) for file, name in calls[1] if file.startswith(FORBIDDEN)})
    assert not wrong
