"""A model whose tables do not fit into memory is served from its files, at once and without settings."""

import hashlib
import json
import logging
from pathlib import Path

import numpy as np
import psutil
import pytest

import viviane as vv
from viviane.serving import InferenceSession
from viviane.serving.parameter_server import automatic
from viviane.training.checkpoint.manifest import Manifest, write_manifest

FEW = 1000


@pytest.fixture
def small(tmp_path: Path) -> Path:
    schema = vv.Schema(labels=[{"name": "click"}], categorical=[{"name": "item", "num_ids": FEW}])
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=64, deep_mlp=[8]))
    model.compile()
    return Path(model.save(tmp_path / "small"))


def grow(folder: Path, rows: int) -> None:
    """Let the tables of a model have more rows: zeros, which take no disk."""
    weights = folder / "weights"
    manifest = json.loads((weights / "manifest.json").read_text())
    for table in manifest["tables"].values():
        file, dim = weights / table["file"], table["weight"]["shape"][1]
        data = file.read_bytes()[-FEW * dim * 4 :]
        head = {"weight": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, rows * dim * 4]}}
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text + data)
            out.truncate(8 + len(text) + rows * dim * 4)
        table["weight"]["shape"] = [rows, dim]
        manifest["files"][table["file"]]["bytes"] = file.stat().st_size
    del manifest["sha256"]
    write_manifest(weights, Manifest.from_dict(manifest))
    schema = json.loads((folder / "schema.json").read_text())
    schema["categorical"][0]["num_ids"] = rows
    (folder / "schema.json").write_text(json.dumps(schema))
    listed = json.loads((folder / "files.json").read_text())
    for name in ("schema.json", "weights/manifest.json"):
        data = (folder / name).read_bytes()
        listed["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for name, entry in manifest["files"].items():
        listed["files"][f"weights/{name}"] = entry
    (folder / "files.json").write_text(json.dumps(listed))


def test_it_answers_with_the_bits_of_memory(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = np.array([0, 1, 7, FEW - 1])
    with InferenceSession(small, device="cpu") as session:
        assert session.tables is None
        wanted = session.predict({"item": asked})
    rows = (psutil.virtual_memory().total + psutil.swap_memory().total) // 256 + (1 << 20)
    grow(small, rows)
    with caplog.at_level(logging.INFO), InferenceSession(small, device="cpu") as session:
        assert session.tables is not None
        assert np.array_equal(session.predict({"item": asked}), wanted)
        assert np.isfinite(session.predict({"item": np.array([rows - 1, rows // 2])})).all()
    assert "of their rows are cached" in caplog.text


@pytest.mark.parametrize(("free", "is_in_tiers"), [(2_000_000, False), (100_000, True), (None, False)])
def test_the_free_memory_decides(
    small: Path, monkeypatch: pytest.MonkeyPatch, free: int | None, is_in_tiers: bool
) -> None:
    monkeypatch.setattr(automatic, "memory_for_tables", lambda device: free)
    with InferenceSession(small, device="cpu") as session:
        assert (session.tables is not None) == is_in_tiers
    with InferenceSession(small, device="cpu", tables={"cache": {"rows": 3}}) as session:
        assert session.tables.settings.cache.rows == 3
