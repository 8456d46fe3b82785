"""`viviane plan`: what it prints, the file it writes, the picture, what it refuses."""

import json
import xml.etree.ElementTree as ET

import pytest
import torch
from typer.testing import CliRunner

from viviane.cli import plan_tiers
from viviane.cli.main import app
from viviane.core.errors import ConfigError
from viviane.data import write_dataset
from viviane.parallel import ShardingPlan
from viviane.schema import Schema

MACHINE = ["--memory-gb", "1", "--memory-gb-per-s", "20", "--link-gb-per-s", "2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    columns = [{"name": "user", "num_ids": 100_000}, {"name": "day", "num_ids": 10}]
    bag = {"name": "seen", "num_ids": 5000, "kind": "multi_hot"}
    schema = Schema(labels=[{"name": "y"}], categorical=[*columns, bag])
    rows = {"y": [0, 1], "user": [3, 4], "day": [3, 3], "seen": [[3, 4, 5, 6], [4, 5, 6, 7]]}
    write_dataset(folder / "train", schema, [rows])
    text = {"data": {"train": str(folder / "train")}, "solver": {"device": "cpu"}, "model": {"zoo": "deepfm", "dim": 8}}
    (folder / "run.json").write_text(json.dumps(text))
    return folder / "run.json"


def test_prints_writes_and_draws_a_plan(config, tmp_path):
    files = ["--output", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.svg")]
    result = CliRunner().invoke(app, ["plan", str(config), "--processes", "3", *MACHINE, *files])
    assert result.exit_code == 0, result.output
    assert "device cpu: 1.0 GB, memory 20.0 GB/s, link 2.0 GB/s (given)" in result.output
    assert "expected:" in result.output
    plan = ShardingPlan.from_json_file(tmp_path / "plan.json")
    assert {"emb.user", "emb.day", "emb.seen"} <= {one.table for one in plan.tables}
    assert plan.world_size == 3
    drawing = ET.fromstring((tmp_path / "plan.svg").read_text())
    texts = ["".join(element.itertext()) for element in drawing.iter()]
    assert any("process 2" in text for text in texts)


def test_measures_the_machine_and_says_what_it_assumed(config):
    result = CliRunner().invoke(app, ["plan", str(config), "--processes", "2", "--memory-gb", "1"])
    assert result.exit_code == 0, result.output
    assert "assumed: 1/4 of the memory's" in result.output


def test_a_model_that_does_not_fit_is_refused(config):
    small = ["--memory-gb", "0.001", "--memory-gb-per-s", "20", "--link-gb-per-s", "2"]
    result = CliRunner().invoke(app, ["plan", str(config), "--processes", "2", *small])
    assert isinstance(result.exception, ConfigError)
    assert "use more processes" in str(result.exception)


def test_gpus_that_are_not_here_are_planned_for_by_their_figures(config, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    figures = ["--memory-gb", "141", "--memory-gb-per-s", "4300", "--link-gb-per-s", "360"]
    found = {}
    for kind in ("--gpus", "--processes"):
        result = CliRunner().invoke(app, ["plan", str(config), kind, "4", *figures])
        assert result.exit_code == 0, result.output
        found[kind] = float(result.output.split("expected: ")[1].split()[0])
        assert f"device {'cuda' if kind == '--gpus' else 'cpu'}: 141.0 GB" in result.output
    assert found["--gpus"] < found["--processes"]  # a GPU's own costs of a row and an exchange
    result = CliRunner().invoke(app, ["plan", str(config), "--gpus", "4", "--memory-gb", "80"])
    assert isinstance(result.exception, ConfigError)
    assert "this machine has no GPU" in str(result.exception)
    assert "--memory-gb-per-s 4300 --link-gb-per-s 360" in str(result.exception)
    assert "--memory-gb 141" not in str(result.exception)
    result = CliRunner().invoke(app, ["plan", str(config), "--gpus", "1", *figures[:4]])
    assert result.exit_code == 0, result.output
    assert "memory 4300.0 GB/s\n" in result.output


def test_shows_tables_in_tiers_with_expected_hits(config, tmp_path):
    schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "user", "num_ids": 100_000}])
    users = [3 + i % 400 for i in range(4000)]  # each comes again after 400 rows
    data = write_dataset(tmp_path / "train", schema, [{"y": [0.0, 1.0] * 2000, "user": users}])
    found = {}
    for room in (300, 1000):
        memory = room * (8 * 4 * 3 + 22)
        text = {"data": {"train": str(data.path)}, "model": {"zoo": "deepfm", "dim": 8}, "solver": {
            "device": "cpu", "batch_size": 100, "shuffle": False, "embedding_memory": {"emb.user": memory},
        }}  # fmt: skip
        (tmp_path / "run.json").write_text(json.dumps(text))
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.json"), *MACHINE])
        assert result.exit_code == 0, result.output
        assert "Tables in tiers" in result.output
        assert "each step reads" in result.output
        [line] = [one for one in result.output.splitlines() if one.strip().startswith("emb.user") and "%" in one]
        found[room] = float(line.split()[-2].rstrip("%"))
    assert found[1000] > 80 > found[300]


@pytest.mark.parametrize("host_rows", [1_000, 400])
def test_on_a_gpu_the_link_counts_and_the_disk_only_where_rows_lie_there(host_rows, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plan_tiers, "link_bytes_per_s", lambda device: 10e9)
    monkeypatch.setattr(plan_tiers, "disk_bytes_per_s", lambda folder: 1e9)
    one = plan_tiers.Placed("emb.user", 1_000, 100, 534, 512, 0.75, 20_000.0, host_rows)
    plan_tiers.show_tiers([one], str(tmp_path), torch.device("cuda"))
    told = " ".join(capsys.readouterr().out.split())
    assert f"{host_rows / 1_000:.1%}" in told
    assert "brings 10.24 MB of rows to the GPU" in told
    assert "10,000 MB/s of a copy of page-locked memory: 1.02 ms" in told
    assert ("this disk" in told) == (host_rows < 1_000)
    assert host_rows == 1_000 or "reads up to 10.24 MB" in told


def test_shows_where_dynamic_tables_are(tmp_path):
    names = ["sized", "small", "file", "plain"]
    schema = Schema(labels=[{"name": "y"}], categorical=[{"name": name, "num_ids": None} for name in names])
    data = write_dataset(tmp_path / "train", schema, [{"y": [0.0, 1.0], **{name: [10**15, 3] for name in names}}])
    bounded = {"max_capacity": 1000}
    tables = {  # rows of 8 numbers with Adam take 96 bytes, and 22 as in a cache
        "sized": {"memory": 999 * 118, "dynamic": bounded}, "small": {"memory": 1000 * 118, "dynamic": bounded},
        "file": {"dynamic": {"memory": "file"}},
    }  # fmt: skip
    graph = [
        {"node": "Input", "sparse": "cats"},
        {"node": "SparseEmbedding", "name": "emb", "bottom": "cats", "dim": 8, "tables": tables},
        {"node": "DenseLayer", "name": "flat", "type": "Reshape", "bottom": ["emb"], "params": {"leading_dim": 32}},
        {"node": "DenseLayer", "name": "score", "type": "MLP", "bottom": ["flat"], "params": {"num_outputs": [1]}},
        {"node": "DenseLayer", "name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["score", "label"]},
    ]
    text = {
        "data": {"train": str(data.path)}, "model": {"nodes": graph}, "optimizer": {"type": "adam"},
        "solver": {"device": "cpu"},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(text))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.json"), *MACHINE])
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.output.splitlines() if "in a working file" in line] == [
        "dynamic table emb.sized, up to 0.000 GB", "dynamic table emb.file, without max_capacity",
    ]  # fmt: skip
    # The keys of all tables, and the rows of those in memory: what a device with less than that has no room for.
    needed = 64 * (1000 + 1000 + 1024 + 1024) + 96 * (1000 + 1024)
    for memory, code in ((needed / 0.85, 0), (needed / 1.05, 1)):
        room = ["--memory-gb", str(memory / 1e9), *MACHINE[2:]]
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.json"), *room])
        assert result.exit_code == code, result.output


def test_either_gpus_or_processes(config):
    result = CliRunner().invoke(app, ["plan", str(config), "--gpus", "2", "--processes", "2", *MACHINE])
    assert isinstance(result.exception, ConfigError)
    assert "give --processes or --gpus" in str(result.exception)


def test_a_link_that_nobody_can_measure_is_not_guessed(config, monkeypatch):
    from viviane.parallel import measure

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(measure, "copy_gb_per_s", lambda device: 3000.0)
    result = CliRunner().invoke(app, ["plan", str(config), "--gpus", "2", "--memory-gb", "80"])
    assert isinstance(result.exception, ConfigError)
    assert "no second GPU" in str(result.exception)
    assert "--link-gb-per-s 360" in str(result.exception)
    result = CliRunner().invoke(app, ["plan", str(config), "--gpus", "2", "--memory-gb", "80", "--link-gb-per-s", "50"])
    assert result.exit_code == 0, result.output
    assert "memory 3000.0 GB/s, link 50.0 GB/s (given)" in result.output
