import importlib.metadata
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane.cli import diagnosis
from viviane.cli.main import app
from viviane.core import machine

run = CliRunner().invoke


def test_this_machine_is_healthy() -> None:
    done = run(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["healthy"]
    assert found["versions"]["torch"]
    assert {operation["name"] for operation in found["operations"]} >= {"embedding_bag", "key_rows", "row_update"}
    assert {check["name"] for check in found["checks"]} == set(diagnosis.CHECKS)


def test_the_tables_show_the_same() -> None:
    done = run(app, ["doctor"])
    assert done.exit_code == 0
    for word in ("Machine", "Extras", "Operations", "Checks", "embedding_bag", "works"):
        assert word in done.output


def test_every_extra_is_explained() -> None:
    extras = importlib.metadata.metadata("viviane").get_all("Provides-Extra")
    assert set(diagnosis.EXTRAS) == set(extras or ())


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_here(*names: str) -> dict[str, str | None]:
        return dict.fromkeys(names)

    monkeypatch.setattr(machine, "versions", nothing_here)
    etl = next(extra_row for extra_row in diagnosis.extras() if extra_row.extra == "etl")
    assert etl.missing == ("duckdb", "ibis-framework")
    done = run(app, ["doctor"])
    assert done.exit_code == 1
    assert "pip install torch numpy" in done.output


def test_a_check_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> diagnosis.Check:
        raise OSError("no [/room] left")

    monkeypatch.setitem(diagnosis.CHECKS, "temporary files", broken)
    done = run(app, ["doctor"])
    assert done.exit_code == 1
    assert "OSError: no [/room] left" in done.output


def test_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_disk_bytes", lambda folder: 1024)
    done = run(app, ["doctor"])
    assert done.exit_code == 1
    assert "set TMPDIR to a folder on a larger disk" in done.output


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    check = diagnosis.CHECKS["gpu"]()
    assert not check.ok
    assert "torch" in check.seen
    assert "CUDA_VISIBLE_DEVICES=" in check.fix


def test_a_loss_that_does_not_fall_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_train_three_steps", lambda device: [0.7, 0.7, 0.6])
    check = diagnosis.CHECKS["training"]()
    assert not check.ok
    assert "does not fall on cpu" in check.seen
