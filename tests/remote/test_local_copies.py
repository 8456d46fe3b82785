"""The cache of local copies: bounded, whole, and safe for those who read from it; retries and their last words."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from store import Store
from viviane.core.errors import ConfigError, DataError, RemoteError
from viviane.core.locations import RemotePath, location
from viviane.core.remote.cache import cache_folder, local_copy
from viviane.core.remote.retry import retried


def put(store: Store, path: str, data: bytes) -> None:
    with store.client().open_output_stream(path, compression=None) as stream:
        stream.write(data)


def copies() -> list[Path]:
    return [one for one in cache_folder().iterdir() if one.is_dir()]


def fetch_in_a_process(url: str, limit_bytes: int | None = None) -> str:
    """Fetch in another process, which then ends; returns the error's text."""
    pipe, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_fetch, args=(url, limit_bytes, end))
    process.start()
    end.close()  # so that a process that dies is an end, not a wait
    text: str = pipe.recv()
    process.join()
    return text


def _fetch(url: str, limit_bytes: int | None, end: multiprocessing.connection.Connection) -> None:  # type: ignore[name-defined]
    if limit_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        local_copy(url)
        end.send("")
    except DataError as error:
        end.send(str(error))


def test_a_process_that_ends_closes_the_locks_of_its_copies(bucket: str, shared_store: Store) -> None:
    put(shared_store, f"{bucket}/file.bin", b"first")
    program = (
        "import sys; from viviane.core.remote.cache import local_copy\nprint(local_copy(sys.argv[1]).read_bytes())"
    )
    words = [sys.executable, "-W", "always::ResourceWarning", "-c", program, f"s3://{bucket}/file.bin"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'first'\n", "")


def test_a_copy_is_fetched_once_and_again_when_it_changes(bucket: str, shared_store: Store) -> None:
    url = f"s3://{bucket}/folder"
    put(shared_store, f"{bucket}/folder/a/b.bin", b"first")
    copy = local_copy(url)
    assert (copy / "a" / "b.bin").read_bytes() == b"first"
    assert local_copy(url) == copy
    put(shared_store, f"{bucket}/folder/a/b.bin", b"second!")
    assert (local_copy(url) / "a" / "b.bin").read_bytes() == b"second!"
    assert local_copy(f"{url}/a/b.bin").read_bytes() == b"second!"
    assert local_copy("/tmp") == Path("/tmp")
    with pytest.raises(RemoteError, match="the URL does not exist"):
        local_copy(f"{url}/none")


@pytest.mark.slow  # three processes that import everything
def test_the_cache_is_bounded_and_spares_what_is_in_use(
    bucket: str, shared_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        put(shared_store, f"{bucket}/{name}/file", os.urandom(400_000))
    monkeypatch.setenv("VIVIANE_CACHE_GB", "0.001")
    kept = local_copy(f"s3://{bucket}/a")  # held by this process
    assert fetch_in_a_process(f"s3://{bucket}/b") == ""
    assert fetch_in_a_process(f"s3://{bucket}/c") == ""  # takes the place of b
    assert len(copies()) == 2
    assert (kept / "file").exists()
    local_copy(f"s3://{bucket}/d")
    with pytest.raises(DataError, match="all copies are in use"):
        local_copy(f"s3://{bucket}/b")
    monkeypatch.setenv("VIVIANE_CACHE_GB", "0.0001")
    with pytest.raises(DataError, match="exceed the maximum size of the local cache"):
        local_copy(f"s3://{bucket}/c")


def test_a_full_disk_leaves_no_half_of_a_copy(bucket: str, shared_store: Store) -> None:
    put(shared_store, f"{bucket}/a/file", os.urandom(400_000))
    text = fetch_in_a_process(f"s3://{bucket}/a", limit_bytes=100_000)
    assert "the disk is full" in text
    assert "400000 bytes are needed" in text
    assert copies() == []
    assert fetch_in_a_process(f"s3://{bucket}/a") == ""
    assert len(copies()) == 1


def test_a_request_is_repeated_and_the_last_error_names_url_and_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    calls: list[int] = []

    def request(failures: int) -> int:
        calls.append(1)
        if len(calls) <= failures:
            raise OSError("connection lost, hush-hush")
        return 7

    assert retried(lambda: request(2), "s3://b/k", "reading") == 7
    calls.clear()
    with pytest.raises(RemoteError, match="reading failed 3 times") as caught:
        retried(lambda: request(3), "s3://b/k", "reading")
    assert "s3://b/k" in str(caught.value)
    assert "hush-hush" not in str(caught.value)
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "none")
    with pytest.raises(ConfigError, match="VIVIANE_REMOTE_ATTEMPTS"):
        retried(lambda: 1, "s3://b/k", "reading")


def test_locations() -> None:
    assert location("s3://bucket") == RemotePath("s3", "bucket", "")
    assert str(location("hdfs://host:8020//a//b/") / "c") == "hdfs://host:8020/a/b/c"
    assert location(Path("gs://bucket/a")) == RemotePath("gs", "bucket", "a")
    for local in ("a/b", "/a/b", "a.b/c", "C:/data"):
        assert location(local) == Path(local)
    assert location("file:///a%20b/c") == Path("/a b/c")
