"""The same road on HDFS (real servers) and on Google's store (an emulator: there is no server of it to be had)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, missing_parts, missing_web_parts
from road import whole_road

from store import free_port
from viviane.core.errors import ConfigError, RemoteError
from viviane.core.locations import RemotePath, location
from viviane.core.remote.cache import local_copy
from viviane.data import Dataset, write_dataset
from viviane.schema import Schema

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "3")
    monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "5")
    monkeypatch.setenv("VIVIANE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("hdfs_native", reason="the client: pip install 'viviane[hdfs]'")
    if reason := missing_parts():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("hdfs")) as started:
        yield started


@pytest.fixture
def web(cluster: Cluster) -> str:
    """Where the cluster answers over HTTP."""
    pytest.importorskip("requests")
    if reason := missing_web_parts():
        pytest.skip(reason)
    return cluster.web_url


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
    port = free_port()
    program = Path(sys.executable).with_name("gcp-storage-emulator")
    words = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory", "--default-bucket", "models"]
    with subprocess.Popen([str(program), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        time.sleep(2)
        yield "gs://models"
        process.kill()


def test_the_whole_road_on_hdfs(cluster: Cluster, tmp_path: Path) -> None:
    whole_road(f"{cluster.url}/viviane", tmp_path)


def test_the_whole_road_over_http(web: str, cluster: Cluster, tmp_path: Path) -> None:
    whole_road(f"{web}/over-http", tmp_path)
    # the same files, by the other protocol
    theirs, ours = (Dataset(f"{url}/over-http/out/train") for url in (cluster.url, web))
    assert [batch.one_hot.tolist() for batch in theirs.reader(9)] == [
        batch.one_hot.tolist() for batch in ours.reader(9)
    ]


def test_what_http_is_asked_for(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = location(f"{web}/odd/a b ü#.bin")
    assert isinstance(place, RemotePath)
    content = bytes(range(256)) * 200_000  # 51 MB: it waits on disk
    place.write_bytes(content)
    with place.ranged() as file:
        assert file.read_at(51_199_990, 100) == content[-10:]
        assert file.read_at(255, 3) == b"\xff\x00\x01"
    assert place.stat().st_size == len(content)
    assert place.stat().st_mtime_ns > 10**18
    assert [one.name for one in place.parent.iterdir()] == ["a b ü#.bin"]
    assert place.parent.is_dir()
    assert not (place.parent / "none").exists()
    assert list((place.parent / "none").files(recursive=True)) == []
    with pytest.raises(FileNotFoundError):
        (place.parent / "none").read_bytes()
    place.parent.remove_folder()
    assert not place.exists()
    with pytest.raises(ConfigError, match="HTTP port"):
        location("webhdfs://host/a").exists()
    nobody = f"webhdfs://127.0.0.1:{free_port()}/a"
    for ask in (lambda: location(nobody).exists(), lambda: list(location(nobody).iterdir())):
        with pytest.raises(RemoteError, match=f"failed 3 times(?s:.*){nobody}"):  # not "there is nothing"
            ask()


@pytest.mark.parametrize("protocol", ["hdfs", "http"])
def test_a_data_node_that_dies(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest, protocol: str) -> None:
    root = cluster.url if protocol == "hdfs" else request.getfixturevalue("web")
    url = f"{root}/dies-{protocol}"
    columns = {"x": np.arange(50_000, dtype=np.float32)}
    write_dataset(url, Schema(dense=[{"name": "x"}]), [columns])
    cluster.stop_data()
    try:
        with pytest.raises(RemoteError, match=f"failed 3 times(?s:.*){root}"):
            list(Dataset(url).reader(10_000))
        with pytest.raises(RemoteError):
            write_dataset(f"{url}2", Schema(dense=[{"name": "x"}]), [columns])
        assert not (location(f"{url}2") / "published.json").exists()
    finally:
        cluster.start_data()
    for _ in range(60):
        try:
            assert sum(batch.size for batch in Dataset(url).reader(10_000)) == 50_000
            break
        except RemoteError:
            time.sleep(0.5)
    else:
        pytest.fail("the rows did not come back with the DataNode")
    local_copy(url)


def test_the_whole_road_on_an_emulator_of_gcs(gcs: str, tmp_path: Path) -> None:
    whole_road(gcs, tmp_path)
