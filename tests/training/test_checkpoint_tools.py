"""Checkpoints without their model: inspect, diff, reshard, export, from Python and from the command line."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.config import AdaGrad, Adam
from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.parallel import ShardingPlan, TablePlan
from viviane.training import Progress, load_checkpoint, read_manifest, verify_checkpoint, write_checkpoint
from viviane.training.checkpoint.export import export_checkpoint
from viviane.training.checkpoint.tools import compare_checkpoints, reshard

KEYS = torch.tensor([7, -1, 2**63 - 1, 0])


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        tables = [
            TableConfig(name="item", num_rows=29, dim=7, init="normal", optimizer=Adam(update="lazy_global")),
            TableConfig(name="half", num_rows=13, dim=5, init="normal", dtype="bfloat16"),
            DynamicTableConfig(name="raw", dim=3, init="normal"),
        ]
        features = [FeatureConfig(name=one.name, table=one.name) for one in tables]
        self.emb = EmbeddingCollection(tables, features, AdaGrad(row_wise=True), seed=seed)
        self.layer = nn.Linear(2, 2)

    def trained(self):
        ids = torch.arange(4)
        for _ in range(2):
            self.emb({"item": ids, "half": ids, "raw": KEYS}).flat.square().sum().backward()
            self.emb.step(0.1)
        return self


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    model = Model().trained()
    write_checkpoint(tmp_path / "c", model, progress=Progress(step=2, history=[{"step": 2}]))
    return tmp_path / "c", model


def cli(*arguments, code=0):
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == code, done.output or done.exception
    return done.output


def plan(item, half):
    return ShardingPlan(world_size=3, tables=[TablePlan(table="item", **item), TablePlan(table="half", **half),
                                      TablePlan(table="raw", kind="table", ranks=[0])])  # fmt: skip


CUTS = [
    plan({"kind": "row", "ranks": [2, 0, 1]}, {"kind": "hybrid", "ranks": [0, 1], "num_hot": 4}),
    plan({"kind": "column", "ranks": [0, 1, 2]}, {"kind": "replicated"}),
    plan({"kind": "table", "ranks": [1]}, {"kind": "row", "ranks": [0, 2]}),
]


@pytest.mark.parametrize("wanted", [1, 2, 4, *CUTS], ids=["1", "2", "4", "rows", "columns", "whole"])
def test_reshard_keeps_every_bit_and_comes_back(saved, tmp_path, wanted):
    path, model = saved
    way = {"processes": wanted} if isinstance(wanted, int) else {"plan": wanted}
    reshard(path, tmp_path / "cut", **way)
    assert compare_checkpoints(path, tmp_path / "cut") == []
    reshard(tmp_path / "cut", tmp_path / "back", processes=1)
    one, other = read_manifest(path), read_manifest(tmp_path / "back")
    assert one == other  # with the check sums of all files
    again = Model(seed=5)
    assert load_checkpoint(tmp_path / "cut", again).step == 2
    for table in ("item", "half"):
        mine, theirs = again.emb.export_table(table), model.emb.export_table(table)
        assert mine.step == theirs.step == 2
        assert torch.equal(mine.weight, theirs.weight)
        assert all(torch.equal(mine.state[name], part) for name, part in theirs.state.items())


def test_reshard_from_the_command_line_and_its_refusals(saved, tmp_path):
    path, _ = saved
    assert "5 files of tables" in cli("reshard", path, tmp_path / "two", "--processes", 2)
    (tmp_path / "plan.json").write_text(json.dumps(CUTS[1].to_dict()))
    assert "5 files of tables" in cli("reshard", path, tmp_path / "three", "--plan", tmp_path / "plan.json")
    verify_checkpoint(tmp_path / "three")
    bad = {"kind": "column", "ranks": [0, 1]}
    for error, way in (
        (r"complete rows[\s\S]*half", {"plan": plan({"kind": "table", "ranks": [0]}, bad)}),
        ("either a number", {}),
        ("misses a table", {"plan": ShardingPlan(world_size=1, tables=[TablePlan(table="x", kind="replicated")])}),
    ):
        with pytest.raises(ConfigError, match=error):
            reshard(path, tmp_path / "none", **way)
        assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="the target folder exists"):
        reshard(path, path, processes=1)


def test_a_truncated_shard_is_named(saved, tmp_path):
    reshard(saved[0], tmp_path / "two", processes=2)
    file = tmp_path / "two" / read_manifest(tmp_path / "two").tables["emb.item"].files[1]
    file.write_bytes(file.read_bytes()[:-1])
    for act in (
        lambda: load_checkpoint(tmp_path / "two", Model()),
        lambda: export_checkpoint(tmp_path / "two", tmp_path / "out"),
        lambda: reshard(tmp_path / "two", tmp_path / "out", processes=1),
    ):
        with pytest.raises(CheckpointError, match=r"(?s)truncated.*emb\.item\.2-of-2"):
            act()
        assert not (tmp_path / "out").exists()


def test_diff_counts_numbers_and_names_tensors(saved, tmp_path):
    path, model = saved
    assert "no difference" in cli("diff", path, path)
    with torch.no_grad():
        model.emb.table_rows("item")[3, 1] += 0.5
        model.emb.table_rows("half")[0, 0] = float("nan")
        model.layer.bias[0] = -model.layer.bias[0]
    write_checkpoint(tmp_path / "d", model, progress=Progress(step=3))
    text = cli("diff", path, tmp_path / "d", code=1)
    assert "step: 2 and 3" in text
    assert "table emb.item: weight: 1 of 203 numbers differ, the largest by 0.5" in text
    assert "table emb.half: weight: 1 of 65 numbers differ, the largest by inf" in text
    assert "dense: layer.bias: 1 of 2 numbers differ" in text
    assert len(text.splitlines()) == 4
    rows = json.loads(cli("diff", path, tmp_path / "d", "--json", code=1))
    assert [row["numbers"] for row in rows[1:]] == [1, 1, 1]


def test_inspect_says_what_it_holds(saved, tmp_path):
    reshard(saved[0], tmp_path / "two", processes=2)
    text = cli("inspect", tmp_path / "two")
    assert "29 rows x 7 float32" in text
    assert "4 keys x 3 float32" in text
    assert "layer.weight  float32[2, 2]" in text
    body = json.loads(cli("inspect", tmp_path / "two", "--json"))
    item = next(one for one in body["tables"] if one["table"] == "emb.item")
    assert (item["files"], item["state"], item["step"]) == (2, ["m", "v", "last_step"], 2)
    assert (body["step"], body["format"]) == (2, 2)
    assert "unexpected extra argument" in cli("inspect", saved[0], saved[0], code=2)
    assert "Missing argument" in cli("diff", saved[0], code=2)
    assert "no command 'look'" in cli("look", saved[0], code=2)
    for word in ("inspect", "diff", "reshard", "compact", "export"):
        assert f"checkpoint {word} [OPTIONS]" in cli(word, "--help")


@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet"])
def test_exported_rows_are_those_of_the_model(saved, tmp_path, kind):
    path, model = saved
    reshard(path, tmp_path / "two", processes=2)
    cli("export", tmp_path / "two", tmp_path / "out", "--format", kind)
    dense = load_file(tmp_path / "out/dense.safetensors")
    assert torch.equal(dense["layer.weight"], model.layer.weight)
    truth = {"emb.item": model.emb.table_rows("item"), "emb.half": model.emb.table_rows("half")}
    content = model.emb.dynamic_table("raw").export()
    for name, rows in {**truth, "emb.raw": content.weight}.items():
        keys = content.keys if name == "emb.raw" else torch.arange(len(rows))
        if kind == "npy":
            found = np.load(tmp_path / f"out/{name}.npy")
            own = np.load(tmp_path / f"out/{name}.keys.npy") if name == "emb.raw" else keys.numpy()
        elif kind == "safetensors":
            tensors = load_file(tmp_path / f"out/{name}.safetensors")
            found = tensors["weight"].float().numpy()
            own = tensors.get("keys", keys).numpy()
        else:
            table = pq.read_table(tmp_path / f"out/{name}.parquet")
            found, own = np.array(table["vector"].to_pylist(), dtype=np.float32), table["key"].to_numpy()
        assert own.tolist() == keys.tolist()
        np.testing.assert_array_equal(found, rows.float().numpy())  # bfloat16 in float32 is exact
