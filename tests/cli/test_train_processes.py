"""`viviane train --processes`: the command in two processes, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError
from viviane.data import Dataset
from viviane.model import Model

SOLVER = {"batch_size": 256, "lr": 0.01, "device": "cpu", "num_threads": 1}


def call(folder, *arguments):
    command = [sys.executable, "-m", "viviane.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_train_the_model_that_one_trains(tmp_path):
    call(tmp_path, "generate", "data", "--rows", 3001, "--valid-rows", 500, "--max-cardinality", 100)
    config = {
        "data": {"train": "data/train", "validation": "data/valid"},
        "solver": SOLVER,
        "model": {"zoo": "dcn_v2", "dim": 4, "deep_mlp": [16]},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    table = Dataset(tmp_path / "data" / "train").schema.categorical[0].table
    plan = json.dumps({table: "row"})
    call(tmp_path, "train", "run.json", "--run-folder", "one")
    output = call(
        tmp_path, "train", "run.json", "--run-folder", "two", "--processes", 2, "--set", f"solver.plan={plan}"
    )
    assert output.count("model:") == output.count("stopped by:") == 1, output  # one of them speaks
    ends = []
    for run in ("one", "two"):
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        model = Model.load(tmp_path / run, device="cpu")
        valid = [row for row in rows if row["split"] == "valid"]
        ends.append((valid[-1], model.predict(Dataset(tmp_path / "data" / "valid"))))
    assert ends[1][0]["step"] == ends[0][0]["step"] == 12
    for name in ("loss", "auc"):
        # Sums of float32 gradients in another order, through 12 steps of Adam.
        assert ends[1][0][name] == pytest.approx(ends[0][0][name], rel=1e-3)
    np.testing.assert_allclose(ends[1][1], ends[0][1], rtol=5e-3, atol=1e-4)


def test_what_cannot_be_started_is_refused(tmp_path):
    runner = CliRunner()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--processes or --gpus"):
        runner.invoke(app, ["train", str(tmp_path / "run.json"), "--processes", "2", "--gpus", "2"],
                      catch_exceptions=False)  # fmt: skip
    with pytest.raises(ConfigError, match=r"more GPUs than this machine has"):
        runner.invoke(app, ["train", str(tmp_path / "run.json"), "--gpus", "1000"], catch_exceptions=False)
