"""`viviane keyset`, and `viviane train` in passes over the folders that it has read."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError, VivianeError
from viviane.data import Dataset, read_key_sets, write_dataset
from viviane.data.key_sets import FORMAT, KEY_SETS_FILE, check_key_sets
from viviane.schema import Schema

SCHEMA = Schema(labels=[{"name": "y"}], categorical=[{"name": "user", "num_ids": 3000}, {"name": "day", "num_ids": 9}])


@pytest.fixture
def days(tmp_path: Path) -> list[Path]:
    for day in range(2):
        users = (np.arange(300) * (7 + day) % 701 + 3).tolist()
        rows = {"y": [0.0, 1.0] * 150, "user": users, "day": [3 + day] * 300}
        write_dataset(tmp_path / f"day{day}", SCHEMA, [rows])
    return [tmp_path / "day0", tmp_path / "day1"]


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_writes_the_keys_of_each_folder_and_trains_in_passes(days: list[Path], tmp_path: Path) -> None:
    printed = run("keyset", *days)
    assert "301 keys of 2 columns in 300 rows" in printed
    for day in days:
        assert read_key_sets(day / KEY_SETS_FILE, Dataset(day))["day"].tolist() == [3 + int(day.name[-1])]
    solver = {"device": "cpu", "batch_size": 50, "embedding_memory": {"user": "40 kB"}}
    text = {"data": {"train": [*map(str, days)]}, "solver": solver, "model": {"zoo": "deepfm", "dim": 8}}
    (tmp_path / "run.json").write_text(json.dumps(text))
    printed = run("train", tmp_path / "run.json", "--run-folder", tmp_path / "run")
    assert "stopped by: epochs" in printed
    assert (tmp_path / "run" / "report.html").is_file()
    run("keyset", days[0], "--output", tmp_path / "raw", "--hugectr", "--i64")
    assert len(np.fromfile(tmp_path / "raw", np.int64)) == 301


def test_what_does_not_go_together_is_refused(days: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output is for one data set"):
        run("keyset", *days, "--output", tmp_path / "keys")
    with pytest.raises(ConfigError, match="--hugectr needs --output"):
        run("keyset", days[0], "--hugectr")
    with pytest.raises(ConfigError, match="--i64 is for --hugectr"):
        run("keyset", days[0], "--i64")


def sealed(arrays: dict[str, np.ndarray], data: Dataset) -> bytes:
    """Return a file of key sets with the check sums that belong to it, as an attacker would make it."""
    seal = hashlib.sha256()
    for name in sorted(arrays):
        seal.update(f"{name}\0{arrays[name].dtype}\0{arrays[name].shape}\0".encode())
        seal.update(np.ascontiguousarray(arrays[name]).data)
    about = {"format": FORMAT, "data_set": data.fingerprint, "sha256": seal.hexdigest()}
    return save(arrays, metadata=about)


def test_crafted_key_sets_are_refused_or_change_no_row(days: list[Path], tmp_path: Path) -> None:
    """A pass whose keys lack some of its rows must not train those on other rows; large keys became negative ones."""
    run("keyset", *days)
    data, file = Dataset(days[0]), days[0] / KEY_SETS_FILE
    good = load(file.read_bytes())
    crafted: dict[str, np.ndarray] = {
        "beyond": np.array([2**63 + 1], np.uint64), "fractions": np.array([3.5]), "matrix": np.array([[3]]),
        "few": good["user"][:3], "outside": np.array([-5, 10**9]),
    }  # fmt: skip
    solver = {"device": "cpu", "batch_size": 50, "embedding_memory": {"user": "40 kB"}}
    text = {"data": {"train": [*map(str, days)]}, "solver": solver, "model": {"zoo": "deepfm", "dim": 8}}
    (tmp_path / "run.json").write_text(json.dumps(text))
    run("train", tmp_path / "run.json", "--run-folder", tmp_path / "truth")
    truth = (tmp_path / "truth/model/weights/tables/emb.user.safetensors").read_bytes()
    outcomes = {}
    for kind, keys in crafted.items():
        file.write_bytes(sealed({**good, "user": keys}, data))
        try:
            run("train", tmp_path / "run.json", "--run-folder", tmp_path / kind)
            same = (tmp_path / kind / "model/weights/tables/emb.user.safetensors").read_bytes() == truth
            outcomes[kind] = "same" if same else "other"
        except VivianeError as error:
            outcomes[kind] = error.what
    assert outcomes["beyond"] == "a key is beyond 63 bits"
    assert "other" not in outcomes.values(), outcomes
    file.unlink()
    (tmp_path / "elsewhere").write_bytes(sealed(good, data))
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VivianeError, match="link points outside"):
        read_key_sets(file, data)
    for wrong in (None, 3, ["user"]):
        with pytest.raises(ConfigError, match="keys by column"):
            check_key_sets(wrong, data, "a test")  # type: ignore[arg-type]
