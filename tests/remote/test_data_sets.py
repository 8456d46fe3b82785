"""Data sets at URLs of a real S3 server: the same rows as on a disk, and every way in which they may be damaged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyarrow.fs import FileSelector, S3FileSystem
from sample_rows import SCHEMA, columns_of, make_rows, rows_of, same_bits

from store import KEYS, Store
from viviane.core.errors import ConfigError, DataError, RemoteError
from viviane.data import Dataset, write_dataset
from viviane.data.conversion import convert
from viviane.schema import Schema


def write(url: str | Path, count: int = 100, **options: object) -> Dataset:
    parts = [columns_of(make_rows(count))]
    return write_dataset(url, SCHEMA, parts, rows_per_group=7, rows_per_file=21, **options)  # type: ignore[arg-type]


def objects(client: S3FileSystem, bucket: str, ending: str) -> list[str]:
    found = client.get_file_info(FileSelector(bucket, recursive=True))
    return sorted(one.path for one in found if one.path.endswith(ending))


def replace(client: S3FileSystem, path: str, change: Callable[[bytes], bytes]) -> None:
    with client.open_input_file(path) as file:
        data = file.read()
    with client.open_output_stream(path, compression=None) as stream:
        stream.write(change(data))


@pytest.mark.parametrize("kind", ["parquet", "viviane"])
def test_the_batches_are_those_of_a_local_copy(bucket: str, tmp_path: Path, kind: str) -> None:
    here, there = write(tmp_path / "set", format=kind), write(f"s3://{bucket}/sets/train", format=kind)
    assert there.fingerprint == here.fingerprint
    assert there.info == {"rows": 100}
    options = {"shuffle": True, "seed": 3, "shuffle_rows": 30, "num_threads": 3}
    pairs = list(zip(there.reader(9, **options), here.reader(9, **options), strict=True))
    assert len(pairs) == 12
    assert all(same_bits(a, b) for a, b in pairs)


def test_a_folder_that_others_copied_is_read_and_converted(bucket: str, shared_store: Store, tmp_path: Path) -> None:
    here = write(tmp_path / "set")
    for file in here.path.iterdir():
        with shared_store.client().open_output_stream(f"{bucket}/copied/{file.name}", compression=None) as stream:
            stream.write(file.read_bytes())
    there = Dataset(f"s3://{bucket}/copied")
    fast = convert(there, f"s3://{bucket}/fast", "viviane")
    assert [row for batch in fast.reader(8) for row in rows_of(batch)] == make_rows(100)


def test_an_empty_data_set(bucket: str) -> None:
    assert len(write(f"s3://{bucket}/none", count=0)) == 0


def test_a_url_that_is_taken_is_replaced_only_on_request(bucket: str, shared_store: Store) -> None:
    url = f"s3://{bucket}/set"
    first = write(url, 10)
    with pytest.raises(ConfigError, match="exists"):
        write(url, 20)
    assert len(write(url, 20, overwrite=True)) == 20
    assert len(list(first.reader(4))) == 3  # the version before is still there for those who read it
    write(url, 30, overwrite=True)
    # the third version removed the first
    assert len(shared_store.client().get_file_info(FileSelector(f"{bucket}/set/versions"))) == 2


@pytest.mark.parametrize("kind", ["parquet", "viviane"])
def test_a_truncated_object_is_refused(bucket: str, shared_store: Store, kind: str) -> None:
    write(f"s3://{bucket}/set", format=kind)
    victim = objects(shared_store.client(), bucket, ".parquet" if kind == "parquet" else ".rows")[1]
    replace(shared_store.client(), victim, lambda data: data[:-1])
    with pytest.raises(RemoteError, match="truncated") as caught:
        Dataset(f"s3://{bucket}/set")
    assert victim in str(caught.value)


def test_an_altered_object_is_refused_when_it_is_copied(
    bucket: str, shared_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"s3://{bucket}/set", format="viviane")
    victim = objects(shared_store.client(), bucket, ".rows")[1]
    replace(shared_store.client(), victim, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.setenv("VIVIANE_CACHE", str(tmp_path / "another"))  # what was written stands copied in the first
    with pytest.raises(RemoteError, match="truncated or altered"):
        Dataset(f"s3://{bucket}/set")
    copies = [one for one in (tmp_path / "another").iterdir() if one.is_dir()]
    assert not copies, "half a copy was left in the cache"


def test_an_object_replaced_while_it_is_read_is_refused(bucket: str, shared_store: Store) -> None:
    data = write(f"s3://{bucket}/set")
    assert next(iter(data.reader(7))).size == 7
    for victim in objects(shared_store.client(), bucket, ".parquet"):
        replace(shared_store.client(), victim, lambda data: data + b"PAR1")
    with pytest.raises(DataError, match="changed after"):
        list(data.reader(7))


def test_an_upload_that_did_not_finish_is_no_data_set(bucket: str, shared_store: Store) -> None:
    write(f"s3://{bucket}/set")
    shared_store.client().delete_file(f"{bucket}/set/published.json")
    with pytest.raises(RemoteError, match="not finish"):
        Dataset(f"s3://{bucket}/set")


def test_nothing_at_the_url(bucket: str) -> None:
    for url in (f"s3://{bucket}/none", f"s3://{bucket}-none/set"):
        with pytest.raises(DataError, match="no data set folder found at this URL") as caught:
            Dataset(url)
        assert url in str(caught.value)


def test_a_server_that_is_silent_for_a_while_costs_time_only(bucket: str, shared_store: Store) -> None:
    data = write(f"s3://{bucket}/set")
    shared_store.pause()
    timer = threading.Timer(1.0, shared_store.go_on)
    timer.start()
    start = time.perf_counter()
    rows = [row for batch in data.reader(9) for row in rows_of(batch)]
    timer.join()
    assert rows == make_rows(100)
    assert time.perf_counter() - start > 0.9


def test_a_server_that_dies_in_the_middle(use: Callable[[Store], str]) -> None:
    pytest.importorskip("moto")
    with Store() as store:
        url = f"s3://{use(store)}/set"
        columns = {"x": np.arange(100_000, dtype=np.float32)}
        data = write_dataset(url, Schema(dense=[{"name": "x"}]), [columns], rows_per_group=2_000)
        batches = iter(data.reader(1_000, num_threads=1))
        assert next(batches).dense[0, 0] == 0
        store.kill()
        with pytest.raises(RemoteError, match="failed 3 times") as caught:
            list(batches)
        assert url in str(caught.value)
        with pytest.raises(RemoteError, match="failed 3 times"):
            write(url + "2", 10)


def test_wrong_credentials_are_refused_at_once_and_never_shown(use: Callable[[Store], str]) -> None:
    pytest.importorskip("moto")
    with Store(INITIAL_NO_AUTH_ACTION_COUNT="2") as store:  # two requests make the bucket; then keys are checked
        url = f"s3://{use(store)}/set"
        start = time.perf_counter()
        with pytest.raises(RemoteError, match="refuses") as caught:
            write(url, 10)
        assert time.perf_counter() - start < 2, "a refusal is not asked for again"
        for secret in KEYS.values():
            assert secret not in str(caught.value) or secret == KEYS["AWS_REGION"]
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/set", "s3:/key:secret@bucket/set", "hdfs://me:secret@host/set"]
)
def test_credentials_in_a_url_are_refused_without_repeating_them(url: str) -> None:
    for given in (url, Path(url)):
        with pytest.raises(ConfigError, match="environment") as caught:
            Dataset(given)
        assert "secret" not in str(caught.value)


def test_unknown_schemes_and_dots_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown URL scheme"):
        Dataset("ftp://host/set")
    with pytest.raises(ConfigError, match=r"\.\."):
        Dataset("s3://bucket/../other")
