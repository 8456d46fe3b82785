"""Versions in folders, several models in one process, loads and unloads under requests."""

import json
import shutil
import sys
import threading
import time

import numpy as np
import pytest

from viviane.core.errors import CheckpointError, ConfigError
from viviane.serving import (
    InferenceSession,
    ModelNotFoundError,
    ModelRepository,
    RepositorySettings,
    SessionClosedError,
    SessionSettings,
)

CPU = SessionSettings(device="cpu")


@pytest.fixture
def versions(models, tmp_path):
    """Two models that score differently, as versions 1 and 2."""
    shutil.copytree(models.path("dcn"), tmp_path / "ctr" / "1")
    shutil.copytree(models.path("deepfm"), tmp_path / "ctr" / "2")
    (tmp_path / "ctr" / "3").mkdir()  # still being copied
    (tmp_path / "ctr" / "notes.txt").write_text("x")
    return tmp_path / "ctr"


def test_version_folders(versions, raw) -> None:
    rows = raw(3, seed=1)
    latest = InferenceSession(versions, device="cpu")
    assert (latest.version, latest.model_name) == (2, "deepfm")
    first = InferenceSession(versions, device="cpu", version=1)
    assert first.version == 1
    assert not np.array_equal(first.predict(rows), latest.predict(rows))
    with pytest.raises(CheckpointError, match="no such version"):
        InferenceSession(versions, version=9)
    (versions.parent / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no saved model"):
        InferenceSession(versions.parent / "empty")


def test_a_load_leaves_the_interpreter_to_requests(versions) -> None:
    """Else each request waits for 5 ms whenever it comes back from a kernel."""
    before, found, ended = sys.getswitchinterval(), set(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            found.add(sys.getswitchinterval())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ModelRepository() as repository:
        repository.load("ctr", versions, version=1, settings=CPU)
    ended.set()
    watcher.join()
    assert min(found) < 0.001 < before
    assert sys.getswitchinterval() == before


def test_loads_unloads_and_pins(versions, models, raw) -> None:
    rows = raw(3, seed=1)
    with ModelRepository() as repository:
        assert repository.load("ctr", versions, version=1, settings=CPU) == 1
        one = repository.predict("ctr", rows)
        assert repository.load("ctr") == 2
        two = repository.predict("ctr", rows)
        assert not np.array_equal(one, two)
        np.testing.assert_array_equal(repository.predict("ctr", rows, version=1), one)
        repository.load("din", models.path("din"), settings=CPU)
        assert repository.names() == {"ctr": [1, 2], "din": [1]}
        assert {(s.name, s.version, s.state) for s in repository.index()} == {
            ("ctr", 1, "ready"), ("ctr", 2, "ready"), ("din", 1, "ready"),
        }  # fmt: skip
        with repository.lease("ctr") as session:
            assert not repository.unload("ctr", 2, timeout_s=0.01)
            np.testing.assert_array_equal(session.predict(rows), two)
            assert "unloading" in {status.state for status in repository.index()}
            np.testing.assert_array_equal(repository.predict("ctr", rows), one)  # the latest that is loaded
        assert [(s.name, s.version) for s in repository.index()] == [("ctr", 1), ("din", 1)]
        assert repository.unload("ctr")
        with pytest.raises(ModelNotFoundError, match="no such model"):
            repository.get("ctr")
        with pytest.raises(ModelNotFoundError, match="no such version"):
            repository.get("din", 4)
    assert repository.names() == {}


def test_a_load_that_fails_leaves_what_was_loaded(versions, raw) -> None:
    repository = ModelRepository()
    repository.load("ctr", versions, version=1, settings=CPU)
    weights = next((versions / "2" / "weights" / "tables").iterdir())
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError):
        repository.load("ctr")
    failed = [status for status in repository.index() if status.state == "failed"]
    assert [(status.version, bool(status.reason)) for status in failed] == [(2, True)]
    assert len(repository.predict("ctr", raw(2, seed=1))) == 2
    with pytest.raises(ConfigError, match="name"):
        repository.load("../ctr", versions)
    with pytest.raises(ModelNotFoundError):
        repository.load("other")


def test_json_clause(versions, models, tmp_path) -> None:
    clause = {
        "models": [
            {"name": "ctr", "path": str(versions), "versions": "all", "session": {"device": "cpu"}},
            {"name": "din", "path": str(models.path("din")), "session": {"device": "cpu", "precision": "bf16"}},
        ]
    }
    for content in (clause, {"inference": clause}):
        (tmp_path / "serve.json").write_text(json.dumps(content))
        with ModelRepository.from_json_file(tmp_path / "serve.json") as repository:
            assert repository.names() == {"ctr": [1, 2], "din": [1]}
            assert repository.get("din").precision == "bf16"
    clause["models"][0]["session"]["devise"] = "cpu"
    with pytest.raises(ConfigError, match="unknown key"):
        RepositorySettings.from_dict(clause)
    with pytest.raises(ConfigError, match="used twice"):
        RepositorySettings.from_dict({"models": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]})


def wait_for_more(counts: list[int], version: int) -> None:
    before, deadline = counts[version], time.monotonic() + 60
    while counts[version] < before + 2 and time.monotonic() < deadline:
        time.sleep(0.01)


def test_no_request_fails_or_mixes_versions_while_versions_change(versions, raw) -> None:
    rows = raw(5, seed=1)
    repository = ModelRepository()
    repository.load("ctr", versions, version=1, settings=CPU)
    one = repository.predict("ctr", rows)
    repository.load("ctr", version=2)
    two = repository.predict("ctr", rows)
    repository.unload("ctr", 2)
    stop, errors, counts = threading.Event(), [], [0, 0, 0]

    def ask() -> None:
        try:
            while not stop.is_set():
                scores = repository.predict("ctr", rows)
                counts[0 if np.array_equal(scores, one) else 1 if np.array_equal(scores, two) else 2] += 1
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        repository.load("ctr", version=2)
        repository.load("ctr", version=1)  # again, replacing the one that was loaded
        wait_for_more(counts, 1)
        repository.unload("ctr", 2)
        wait_for_more(counts, 0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert counts[0] > 0
    assert counts[1] > 0
    assert counts[2] == 0
    repository.close()
    assert repository.index() == []


def test_a_session_that_was_loaded_anew_and_unloaded_is_freed_when_its_last_request_ends(models) -> None:
    with ModelRepository() as repository:
        repository.load("ctr", models.path("deepfm"), settings=CPU)
        with repository.lease("ctr") as first:
            repository.load("ctr", version=1)
            assert repository.unload("ctr")
            assert [one.state for one in repository.index()] == ["unloading"]
        assert repository.index() == []
        with pytest.raises(SessionClosedError):
            first.predict([])
