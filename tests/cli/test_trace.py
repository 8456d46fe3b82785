"""`viviane trace`: what it prints and writes, on data of one's own and on synthetic rows; what it refuses."""

import gzip
import html
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.config import Solver
from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset, write_dataset
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import DLRM

run = CliRunner().invoke


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    columns = [{"name": "user", "num_ids": 100}, {"name": "seen", "num_ids": 50, "kind": "multi_hot", "max_length": 3}]
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x", "dim": 2}], categorical=columns)
    rows = {"y": [0, 1] * 40, "x": [[0.5, 1.0]] * 80, "user": [3, 4] * 40, "seen": [[3, 4], []] * 40}
    write_dataset(folder / "train", schema, [rows])
    text = {
        "data": {"train": str(folder / "train")},
        "solver": {"device": "cpu", "batch_size": 32, "num_threads": 1},
        "model": {"zoo": "dlrm", "dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
    }
    (folder / "run.json").write_text(json.dumps(text))
    model = Model(Solver(device="cpu", batch_size=16), Dataset(folder / "train"))
    model.add(DLRM(dim=4))
    model.compile()
    model.save(folder / "model")
    return folder


@pytest.mark.parametrize(
    ("source", "options"), [("run.json", []), ("run.json", ["--synthetic"]), ("model", ["--batch-size", "8"])]
)
def test_prints_ranges_and_writes_trace_picture_and_page(folder, tmp_path, source, options):
    words = ["trace", str(folder / source), "--steps", "2", "--device", "cpu", "--output", str(tmp_path)]
    done = run(app, [*words, *options])
    assert done.exit_code == 0, done.output
    for name in ("read", "forward", "lookup emb", "layer top", "loss", "backward", "table update", "dense optimizer"):
        assert name in done.output
    assert source == "run.json" or "a step of 8 rows" in done.output
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("viviane: step") == 2
    ET.fromstring((tmp_path / "trace.svg").read_text())
    assert "Where a step's time goes" in html.unescape((tmp_path / "trace.html").read_text())


def test_the_saved_model_is_not_touched(folder, tmp_path):
    before = {file: file.read_bytes() for file in (folder / "model").rglob("*") if file.is_file()}
    run(app, ["trace", str(folder / "model"), "--steps", "1", "--device", "cpu", "--output", str(tmp_path)])
    assert before == {file: file.read_bytes() for file in (folder / "model").rglob("*") if file.is_file()}


def test_what_is_wrong_is_refused(folder, tmp_path):
    done = run(app, ["trace", str(folder / "model"), "--set", "solver.lr=1", "--output", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "--batch-size" in str(done.exception)
    done = run(app, ["trace", str(folder / "run.json"), "--data", str(tmp_path / "none"), "--output", str(tmp_path)])
    assert isinstance(done.exception, DataError)


@pytest.mark.slow
def test_rank_0_of_two_processes_records(folder, tmp_path):
    command = [sys.executable, "-m", "viviane", "trace", str(folder / "run.json"), "--steps", "2", "--processes", "2"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("picture:") == 1
    assert "exchange" in done.stdout
