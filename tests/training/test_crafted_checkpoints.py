"""Checkpoints made to do harm: names that leave the folder, files that are not listed, shards that overlap."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.config import Adam
from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.optim.dense import build_dense_optimizer
from viviane.training import Progress, load_checkpoint, read_manifest, verify_checkpoint, write_checkpoint
from viviane.training.checkpoint.export import export_checkpoint
from viviane.training.checkpoint.manifest import MAX_SHARDS, ShardEntry, TableEntry, TensorEntry
from viviane.training.checkpoint.tensor_files import write_tensors
from viviane.training.checkpoint.tools import compare_checkpoints, reshard


class Model(nn.Module):
    def __init__(self, *extra: TableConfig) -> None:
        super().__init__()
        tables = [TableConfig(name="item", num_rows=12, dim=4), DynamicTableConfig(name="raw", dim=3), *extra]
        self.emb = EmbeddingCollection(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables], Adam())
        self.layer = nn.Linear(2, 2)

    def trained(self):
        self.emb({"item": torch.arange(4), "raw": torch.tensor([5, -9, 5, 7])}).flat.square().sum().backward()
        self.emb.step(0.1)
        return self


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder / "one", Model().trained(), progress=Progress(step=1, history=[{"step": 1}]))
    reshard(folder / "one", folder / "two", processes=2)
    return folder


def craft(path: Path, change) -> None:
    """Change the manifest and seal it again, as anyone can."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def entry(file: Path) -> dict:
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def tree(folder: Path) -> dict:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def every_tool(path: Path, out: Path):
    yield "verify", lambda: verify_checkpoint(path)
    yield "read", lambda: read_manifest(path)
    yield "load", lambda: load_checkpoint(path, Model(), weights_only=True)
    yield "reshard", lambda: reshard(path, out / "new", processes=2)
    yield "diff", lambda: compare_checkpoints(path, path)
    for kind in ("npy", "safetensors", "parquet"):
        yield kind, lambda kind=kind: export_checkpoint(path, out / "new", kind)


NAMES = ["../secret", "/etc/hostname", "a/../../secret", "..\\secret", "C:\\secret", "tables/./x", "", "tables//x"]


@pytest.mark.parametrize("place", ["files", "table", "shard"])
@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_folder(whole, tmp_path, place, name):
    """With the right size and check sum, as an attacker who knows the file would write them."""
    path, secret = tmp_path / "in/c", tmp_path / "in/secret"
    shutil.copytree(whole / ("two" if place == "shard" else "one"), path)
    secret.write_bytes((whole / "one/tables/emb.item.safetensors").read_bytes())
    (tmp_path / "out").mkdir()

    def change(body):
        body["files"][name] = entry(secret)
        if place == "table":
            body["tables"]["emb.item"]["file"] = name
        if place == "shard":
            body["tables"]["emb.item"]["shards"][0]["file"] = name

    craft(path, change)
    before = tree(tmp_path)
    for what, call in every_tool(path, tmp_path / "out"):
        with pytest.raises(CheckpointError, match="points outside its folder") as caught:
            call()
        assert "manifest.json" in str(caught.value), what
    assert tree(tmp_path) == before


def test_links_that_leave_the_folder(whole, tmp_path):
    path, secret = tmp_path / "c", tmp_path / "secret"
    shutil.copytree(whole / "one", path)
    (path / "dense.safetensors").rename(secret)
    (path / "dense.safetensors").symlink_to(secret)
    (tmp_path / "out").mkdir()
    for _, call in every_tool(path, tmp_path / "out"):
        with pytest.raises(CheckpointError, match="symbolic link"):
            call()
    (path / "dense.safetensors").unlink()
    secret.rename(path / "dense.safetensors")
    (path / "tables").rename(tmp_path / "tables")
    (path / "tables").symlink_to(tmp_path / "tables")
    with pytest.raises(CheckpointError, match="symbolic link"):
        verify_checkpoint(path)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["dense.safetensors", "tables/emb.item.safetensors", "tables/emb.raw.safetensors"])
def test_every_file_that_is_read_is_listed(whole, tmp_path, name):
    path = tmp_path / "c"
    shutil.copytree(whole / "one", path)
    craft(path, lambda body: body["files"].pop(name))
    (tmp_path / "out").mkdir()
    for _, call in every_tool(path, tmp_path / "out"):
        with pytest.raises(CheckpointError, match="names a file that it does not list") as caught:
            call()
        assert name in str(caught.value)


def test_the_optimizer_s_file_is_listed(whole, tmp_path):
    model = Model().trained()
    optimizer = build_dense_optimizer(Adam(), model.layer.parameters(), 0.1)
    write_checkpoint(tmp_path / "c", model, optimizer=optimizer)
    craft(tmp_path / "c", lambda body: body["files"].pop("dense_optimizer.safetensors"))
    with pytest.raises(CheckpointError, match="has no state of the dense optimizer"):
        load_checkpoint(tmp_path / "c", Model(), optimizer=optimizer)
    load_checkpoint(tmp_path / "c", Model(), weights_only=True)


def test_two_tables_of_one_file(whole, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(whole / "one", path)
    craft(path, lambda body: body["tables"]["emb.raw"].update(file="tables/emb.item.safetensors"))
    with pytest.raises(CheckpointError, match="two parts of the checkpoint name the same file"):
        verify_checkpoint(path)


SHARDS = [
    ("overlap", [((0, 12, 2), (0, 4)), ((0, 12, 2), (0, 4))]),
    ("overlap", [((0, 8, 1), (0, 4)), ((4, 8, 1), (0, 4))]),
    ("overlap", [((0, 12, 2), (0, 4)), ((0, 12, 3), (0, 4)), ((1, 5, 2), (0, 4))]),
    ("do not cover", [((0, 12, 2), (0, 4)), ((1, 11, 2), (0, 4))]),
    ("exceeds the bounds of the table", [((0, 12, 1), (0, 3)), ((0, 12, 1), (4, 5))]),
    ("exceeds the bounds of the table", [((0, 6, 1), (0, 4)), ((6, 18, 2), (0, 4))]),
    ("exceeds the bounds of the table", [((0, 12, 1), (0, 4)), ((0, 12, 1), (3, 2))]),
    ("greater than or equal to 0", [((-6, 6, 1), (0, 4))]),
    ("greater than or equal to 1", [((0, 12, 0), (0, 4))]),
    ("malformed", [((11, -1, -1), (0, 4))]),
    ("less than or equal to|altered", [((0, 2**70, 1), (0, 4))]),
]


@pytest.mark.parametrize(("said", "shards"), SHARDS)
def test_shards_that_overlap_leave_the_table_or_miss_a_part(whole, tmp_path, said, shards):
    path = tmp_path / "c"
    shutil.copytree(whole / "two", path)

    def change(body):
        old = [one["file"] for one in body["tables"]["emb.item"]["shards"]]
        files = [*old, *(f"tables/more{n}.safetensors" for n in range(9))]
        for name in files[2:]:
            body["files"][name] = body["files"][old[0]]
        body["tables"]["emb.item"]["shards"] = [
            {"file": file, "keys": keys, "columns": columns}
            for file, (keys, columns) in zip(files, shards, strict=False)
        ]

    craft(path, change)
    for _, call in every_tool(path, tmp_path / "out"):
        with pytest.raises(CheckpointError, match=said):
            call()


ranges = st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 4))


@given(st.lists(st.tuples(ranges, st.tuples(st.integers(0, 2), st.integers(0, 3))), min_size=1, max_size=5))
def test_shards_pass_if_they_hold_every_number_once(parts):
    """Against counting every number of a table of 6 rows and 2 columns."""
    shards = [ShardEntry(file=f"f{n}", keys=keys, columns=columns) for n, (keys, columns) in enumerate(parts)]
    cells = [(row, column) for one in shards for row in one.rows for column in range(*one.columns)]
    good = sorted(cells) == [(row, column) for row in range(6) for column in range(2)]
    good = good and all(one.columns[0] <= one.columns[1] for one in shards)
    good = good and all(one.columns[1] <= 2 and (not one.rows or one.rows[-1] < 6) for one in shards)
    weight = TensorEntry(shape=(6, 2), dtype="float32")
    if good:
        TableEntry(shards=tuple(shards), weight=weight)
    else:
        with pytest.raises(ConfigError):
            TableEntry(shards=tuple(shards), weight=weight)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_plans_of_every_kind_pass(count):
    rows, dim = 29, 14
    weight = TensorEntry(shape=(rows, dim), dtype="float32")
    by_row = [((n, rows, count), (0, dim)) for n in range(count)]
    by_column = [((0, rows, 1), (dim * n // count, dim * (n + 1) // count)) for n in range(count)]
    hybrid = [((0, 4, 1), (0, dim)), *(((4 + n, rows, count), (0, dim)) for n in range(count))]
    with_empty = [((n, 1, count), (0, dim)) for n in range(count)] + [((1, rows, 1), (0, dim)), ((0, rows, 1), (3, 3))]
    for parts in (by_row, by_column, hybrid, with_empty):
        shards = tuple(ShardEntry(file=f"f{n}", keys=k, columns=c) for n, (k, c) in enumerate(parts))
        assert len(TableEntry(shards=shards, weight=weight).shards) == len(parts)


def test_many_shards_are_checked_in_seconds():
    shards = tuple(ShardEntry(file=str(n), keys=(n, MAX_SHARDS, MAX_SHARDS), columns=(0, 1)) for n in range(MAX_SHARDS))
    TableEntry(shards=shards, weight=TensorEntry(shape=(MAX_SHARDS, 1), dtype="float32"))
    with pytest.raises(ConfigError, match="at most"):
        TableEntry(shards=(*shards, shards[0]), weight=TensorEntry(shape=(MAX_SHARDS + 1, 1), dtype="float32"))


@pytest.mark.parametrize("shape", [[], [3], [3, 2, 1], [-1, 4], [2**80, 4], ["x", 1]])
def test_shapes_that_no_table_has(whole, tmp_path, shape):
    path = tmp_path / "c"
    shutil.copytree(whole / "one", path)
    craft(path, lambda body: body["tables"]["emb.item"]["weight"].update(shape=shape))
    with pytest.raises(CheckpointError, match=r"malformed|altered"):
        verify_checkpoint(path)


@pytest.mark.parametrize("file", ["dense.safetensors", "tables/emb.item.safetensors", "tables/emb.raw.safetensors"])
def test_files_that_hold_other_tensors_than_the_manifest_says(whole, tmp_path, file):
    """Listed with their true check sums; nothing of the model changes."""
    path = tmp_path / "c"
    shutil.copytree(whole / "one", path)
    found = write_tensors(path / file, {"weight": torch.zeros(1, 1), "layer.weight": torch.zeros(3)})
    craft(path, lambda body: body["files"].update({file: found.to_dict()}))
    model = Model()
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(CheckpointError, match=r"does not match the manifest|differ from the manifest"):
        load_checkpoint(path, model, weights_only=True)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    if file != "dense.safetensors":
        for out, call in (("a", reshard), ("b", export_checkpoint)):
            with pytest.raises(CheckpointError, match="does not match the manifest"):
                call(path, tmp_path / out, **({"processes": 1} if call is reshard else {}))
            assert not (tmp_path / out).exists()


def test_tables_that_would_be_exported_to_one_file(tmp_path):
    tables = [TableConfig(name="dense", num_rows=3, dim=2), TableConfig(name="raw.keys", num_rows=3, dim=2),
              DynamicTableConfig(name="raw", dim=2)]  # fmt: skip
    collection = EmbeddingCollection(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables], Adam())
    collection({"dense": torch.tensor([0]), "raw.keys": torch.tensor([0]), "raw": torch.tensor([7])})
    write_checkpoint(tmp_path / "c", collection)
    for kind, name in (("safetensors", "dense.safetensors"), ("npy", "raw.keys.npy")):
        with pytest.raises(ConfigError, match="would have the same file name") as caught:
            export_checkpoint(tmp_path / "c", tmp_path / "out", kind)
        assert name in str(caught.value)
        assert not (tmp_path / "out").exists()
    assert len(export_checkpoint(tmp_path / "c", tmp_path / "out", "parquet")) == 4


def test_the_command_line_refuses_them_too(whole, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(whole / "one", path)
    craft(path, lambda body: body["tables"]["emb.item"].update(file="../../.bashrc"))
    out = tmp_path / "o"
    for words in (["inspect"], ["diff", path], ["reshard", out, "--processes", "2"], ["export", out]):
        done = CliRunner().invoke(app, ["checkpoint", words[0], str(path), *map(str, words[1:])])
        assert isinstance(done.exception, CheckpointError), words
        assert ".bashrc" in str(done.exception)
    assert not out.exists()
