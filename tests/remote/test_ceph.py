"""The whole road on Ceph's S3 gateway: a real one, with its monitor and its store of objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from ceph import Gateway, missing_parts
from road import whole_road

from viviane.core.errors import RemoteError
from viviane.data import Dataset, write_dataset
from viviane.schema import Schema

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCHEMA = Schema(dense=[{"name": "x"}])


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    if reason := missing_parts():
        pytest.skip(reason)
    with Gateway(tmp_path_factory.mktemp("ceph")) as started:
        yield started


@pytest.fixture
def bucket(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name, value in gateway.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VIVIANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "3")
    monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "10")
    name = f"bucket-{uuid4().hex[:12]}"
    gateway.client().create_dir(name)
    return name


def test_the_whole_road_on_ceph(bucket: str, tmp_path: Path) -> None:
    whole_road(f"s3://{bucket}/viviane", tmp_path)


def test_a_file_of_many_parts(bucket: str) -> None:
    x = np.arange(6_000_000, dtype=np.float32)  # 24 MB: sent in several parts, read by ranges
    data = write_dataset(f"s3://{bucket}/set", SCHEMA, [{"x": x}], rows_per_file=6_000_000)
    assert len(data.files) == 1
    with data.reader(100_000) as reader:
        assert np.array_equal(np.concatenate([batch.dense[:, 0].numpy() for batch in reader]), x)


def test_a_wrong_key_is_refused_at_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(f"s3://{bucket}/set", SCHEMA, [{"x": [1.0]}])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-of-this-user")
    with pytest.raises(RemoteError, match="refuses") as caught:
        Dataset(f"s3://{bucket}/set")
    assert "not-the-secret" not in str(caught.value)


def test_a_gateway_that_dies_in_the_middle(bucket: str, gateway: Gateway) -> None:
    """The last test: the gateway does not come back."""
    url = f"s3://{bucket}/set"
    data = write_dataset(url, SCHEMA, [{"x": np.arange(100_000, dtype=np.float32)}], rows_per_group=2_000)
    batches = iter(data.reader(1_000, num_threads=1))
    assert next(batches).dense[0, 0] == 0
    gateway.kill()
    with pytest.raises(RemoteError, match="failed 3 times") as caught:
        list(batches)
    assert url in str(caught.value)
