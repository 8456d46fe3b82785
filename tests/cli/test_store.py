"""`viviane store`: import, inspect, export and verify on a real RocksDB."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import viviane as vv
from viviane.cli.main import app
from viviane.core.errors import CheckpointError, ConfigError

pytest.importorskip("rocksdict", reason="the store: pip install 'viviane[rocksdb]'")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with("city", tmp_path_factory.mktemp("store") / "model")


def save_with(column: str, folder: Path) -> Path:
    schema = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": column, "num_ids": 40}])
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
    model.compile()
    return Path(str(model.save(folder)))


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["store", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_go_in_and_come_out(saved: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiers.json"
    config.write_text(json.dumps({"rocksdb": {"folder": str(tmp_path / "db")}}))
    given = [str(saved), "--config", str(config)]
    assert "emb.city: 40 rows written" in run("import", *given)
    assert "emb.city: 0 rows written" in run("import", *given)
    told = run("inspect", *given)
    assert "emb.city: weight float32 x 4, 16 bytes a row; rows: rocksdb 40, snapshot 40\n" in told
    assert "check sum" in run("verify", *given)
    run("export", *given, "-o", str(tmp_path / "out"))
    layout = json.loads((tmp_path / "out" / "emb.city" / "layout.json").read_text())
    keys = np.fromfile(tmp_path / "out" / "emb.city" / "keys.i64", "<i8")
    rows = np.fromfile(tmp_path / "out" / "emb.city" / "rows.bin", "<f4").reshape(40, 4)
    assert layout["num_rows"] == 40
    weight = vv.Model.load(saved, device="cpu").module.emb.table_rows("city")
    assert np.array_equal(rows[np.argsort(keys)], weight.numpy())


def test_a_column_named_like_a_path_stays_in_the_folder(tmp_path: Path) -> None:
    """Rows of a column called a/../../../evil were written three folders higher."""
    given = [str(save_with("a/../../../evil", tmp_path / "model")), "--config", str(tmp_path / "tiers.json")]
    (tmp_path / "tiers.json").write_text(json.dumps({"rocksdb": {"folder": str(tmp_path / "db")}}))
    out = tmp_path / "one/two/out"
    assert "40 rows" in run("export", *given, "-o", str(out))
    assert {one.parent.parent for one in tmp_path.rglob("keys.i64")} == {out}
    with pytest.raises(ConfigError, match="the output exists"):
        run("export", *given, "-o", str(out))
    assert "40 rows" in run("export", *given, "-o", str(out), "--overwrite")


def test_what_cannot_be_is_refused(saved: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiers.json"
    config.write_text("{}")
    with pytest.raises(ConfigError, match="no store"):
        run("inspect", str(saved), "--config", str(config))
    config.write_text(json.dumps({"rocksdb": {"folder": str(tmp_path / "db")}}))
    for words, message in ((["inport"], "did you mean 'import'"), (["export"], "Missing option '--output'")):
        result = CliRunner().invoke(app, ["store", *words, str(saved), "--config", str(config)])
        assert result.exit_code == 2
        assert message in result.output
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    file = next((damaged / "weights" / "tables").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        run("verify", str(damaged), "--config", str(config))


def test_a_config_of_something_else_is_refused(tmp_path: Path) -> None:
    tiers = tmp_path / "ps.json"
    for content, problem in (
        ({"redis": {"address": "127.0.0.1:1"}}, "Redis hold copies"),
        ({"tables": {"rocksdb": {"folder": "db"}}}, "more than the tiers of one model"),
        ({"inference": {"models": []}}, "what stands under `tables`"),
    ):
        tiers.write_text(json.dumps(content))
        result = CliRunner().invoke(app, ["store", "inspect", str(tmp_path), "--config", str(tiers)])
        assert result.exit_code != 0
        assert problem in f"{result.output} {result.exception}"
