"""Incremental checkpoints: the bits of whole ones, chains that are verified, compaction, other numbers of processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tables_in_tiers import MEMORY, fit, make_model, make_rows
from test_tables_in_tiers import SCHEMA as TIERED
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.config import SGD, AdaGrad, Adam, RowWiseAdam
from viviane.core.errors import CheckpointError, ConfigError
from viviane.data import write_dataset
from viviane.training import CheckpointStore, Progress, load_checkpoint, read_manifest, verify_checkpoint
from viviane.training.checkpoint.increments import chain_of, open_table
from viviane.training.checkpoint.manifest import write_manifest
from viviane.training.checkpoint.tools import compact, compare_checkpoints, reshard


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "train", TIERED, [make_rows(1024, 0)], rows_per_group=128)
    write_dataset(folder / "valid", TIERED, [make_rows(200, 1)])
    return folder


def steps_of(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("memory", [None, MEMORY], ids=["memory", "tiers"])
@pytest.mark.parametrize(
    "rule", [pytest.param(SGD(), marks=pytest.mark.slow), pytest.param(AdaGrad(row_wise=True), marks=pytest.mark.slow),
             Adam(update="lazy_global")], ids=["sgd", "adagrad", "lazy adam"],
)  # fmt: skip
def test_a_chain_reads_as_the_whole_checkpoints(data: Path, tmp_path: Path, memory: Any, rule: Any) -> None:
    settings = {"optimizer": rule, "epochs": 1, "checkpoint_every": 7, "keep_checkpoints": 9}
    fit(data, tmp_path / "whole", **settings)
    fit(data, tmp_path / "chain", embedding_memory=memory, incremental_checkpoints=2, **settings)
    whole, chain = steps_of(tmp_path / "whole"), steps_of(tmp_path / "chain")
    lengths = [len(list(chain_of(one, read_manifest(one)))) for one in chain]
    assert lengths == [1, 2, 3, 1, 2]  # a whole one after two increments
    for one, other in zip(whole, chain, strict=True):
        assert not compare_checkpoints(one, other)
    small = sum(file.bytes for name, file in read_manifest(chain[1]).files.items() if "table" in name)
    large = sum(file.bytes for name, file in read_manifest(whole[1]).files.items() if "table" in name)
    assert small < 0.6 * large
    compact(chain[2], tmp_path / "one")
    assert read_manifest(tmp_path / "one").base is None
    assert not compare_checkpoints(tmp_path / "one", whole[2])
    table = read_manifest(whole[2]).tables
    assert read_manifest(tmp_path / "one").tables == table


def test_a_run_resumes_from_an_increment_and_keeps_its_bases(data: Path, tmp_path: Path) -> None:
    settings = {"epochs": 1, "checkpoint_every": 4, "keep_checkpoints": 1}
    fit(data, tmp_path / "straight", **settings)
    run = tmp_path / "run"
    fit(data, run, max_steps=14, incremental_checkpoints=9, **settings)
    kept = steps_of(run)
    assert [one.name[-2:] for one in kept] == ["04", "08", "12", "14"]  # one is kept, and what it needs
    fit(data, run, resume=True, incremental_checkpoints=9, **settings)
    found = compare_checkpoints(steps_of(run)[-1], steps_of(tmp_path / "straight")[-1])
    assert not [row for row in found if "progress" not in row["tensor"]]
    last = read_manifest(steps_of(run)[-1])
    assert last.base is not None
    assert last.base.folder == "step-00000028"


def test_what_cannot_be_followed_is_whole_in_every_checkpoint(data: Path, tmp_path: Path) -> None:
    for name, settings in {"global": {"optimizer": Adam(update="global")}, "mean": {"ema_decay": 0.9}}.items():
        run = tmp_path / name
        fit(data, run, epochs=1, checkpoint_every=8, incremental_checkpoints=9, **settings)
        last = read_manifest(steps_of(run)[-1])
        assert not any(table.is_increment for table in last.tables.values())
        verify_checkpoint(steps_of(run)[-1])


def saved(tmp_path: Path, rule: Any = None) -> tuple[CheckpointStore, Any]:
    """A store with a whole checkpoint at step 1 and an increment at step 2 after a change of some rows."""
    model = make_model(rule or RowWiseAdam())
    store = CheckpointStore(tmp_path / "run", 9, most_increments=5)
    change(model, store, 1)
    change(model, store, 2)
    return store, model


def change(model: Any, store: CheckpointStore, step: int) -> None:
    emb = model.module.emb
    rows = torch.arange(step, 40 * step, 3) + 3
    emb({"user": rows, "item": rows, "seen": rows.unsqueeze(1)}).flat.sin().sum().backward()
    emb.step(lr=0.1)
    store.save(model.module, model.trainer.stepper.optimizer, Progress(step=step))


def test_tables_that_are_replaced_are_in_the_next_increment(tmp_path: Path) -> None:
    store, model = saved(tmp_path)
    content = model.module.emb.export_table("user", copy=True)
    content.weight.add_(1.0)
    model.module.emb.import_table("user", content)
    store.save(model.module, model.trainer.stepper.optimizer, Progress(step=3))
    other = make_model(RowWiseAdam())
    load_checkpoint(store.path(3), other.module, optimizer=other.trainer.stepper.optimizer)
    assert torch.equal(other.module.emb.table_rows("user"), model.module.emb.table_rows("user"))


def test_a_damaged_missing_or_other_base_is_named(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    first, second = store.path(1), store.path(2)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    [table] = first.glob("tables/*user*")
    content = bytearray(table.read_bytes())
    content[-5] ^= 1
    table.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"(?s)altered.*step-00000001.*user"):
        verify_checkpoint(second)
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match=r"(?s)base of an incremental checkpoint is missing.*step-00000001"):
        verify_checkpoint(second)
    saved(tmp_path / "other", AdaGrad())
    shutil.copytree(tmp_path / "other" / "run" / "step-00000001", first)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        verify_checkpoint(second)
    assert store.latest_whole() == first


def test_crafted_increments_are_refused(tmp_path: Path) -> None:
    from viviane.training.checkpoint.tensor_files import read_tensors, write_tensors

    store, _ = saved(tmp_path)
    second = store.path(2)
    manifest = read_manifest(second)
    full = next(name for name in manifest.tables if name.endswith("user"))
    file = manifest.tables[full].file
    assert file is not None
    good = {name: one.clone() for name, one in read_tensors(second / file).items()}
    bad = {
        "falling": good["keys"].flip(0), "outside": good["keys"] + 10**9, "negative": good["keys"] - 10**6,
        "another type": good["keys"].int(), "short": good["keys"][:-1],
    }  # fmt: skip
    for what, keys in bad.items():
        write_tensors(second / file, {**good, "keys": keys})
        with pytest.raises(CheckpointError):
            open_table(second, manifest, full).read("weight", range(10))
        assert what
    for base in ("../run", "..", "/tmp", ""):
        body = manifest.to_dict() | {"base": {"folder": base, "sha256": "0" * 64}}
        with pytest.raises(ConfigError):
            type(manifest).from_dict(body)
    with pytest.raises(ConfigError, match="names no base"):
        type(manifest).from_dict({name: one for name, one in manifest.to_dict().items() if name != "base"})
    itself = manifest.model_copy(update={"base": manifest.base.model_copy(update={"folder": second.name})})
    write_manifest(second, itself)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        verify_checkpoint(second)


def test_the_command_line_shows_cuts_and_compacts_increments(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    run = CliRunner().invoke
    shown = json.loads(run(app, ["checkpoint", "inspect", str(store.path(2)), "--json"]).output)
    assert [one["folder"] for one in shown["bases"]] == ["step-00000001"]
    assert all(table["increment"] for table in shown["tables"])
    text = run(app, ["checkpoint", "inspect", str(store.path(2))]).output
    assert "base   step-00000001  step 1" in text
    assert "changed rows alone" in text
    done = run(app, ["checkpoint", "compact", str(store.path(2)), str(tmp_path / "whole")])
    assert "whole tables" in done.output
    reshard(store.path(2), tmp_path / "cut", processes=3)
    assert not compare_checkpoints(tmp_path / "cut", tmp_path / "whole")
    assert not compare_checkpoints(tmp_path / "cut", store.path(2))
