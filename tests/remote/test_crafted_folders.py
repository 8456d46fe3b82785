"""Remote folders whose names lead out of the folder of the local copy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from store import Store
from viviane.core.errors import RemoteError
from viviane.core.remote.cache import cache_folder, local_copy
from viviane.data import Dataset


def put(store: Store, path: str, data: bytes) -> None:
    with store.client().open_output_stream(path, compression=None) as stream:
        stream.write(data)


def everything(folder: Path) -> set[str]:
    return {str(one) for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../../evil", "..\\evil", "C:evil"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_published_names(bucket: str, shared_store: Store, name: str, what: str) -> None:
    entry = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    content = {"format": "viviane-published", "version": 1, "folder": "versions/1", "files": {"a": entry}}
    content |= {"files": {name: entry}} if what == "file" else {"folder": name}
    put(shared_store, f"{bucket}/set/published.json", json.dumps(content).encode())
    put(shared_store, f"{bucket}/set/versions/1/a", b"x")
    above = cache_folder().parent
    before = everything(above)
    for read in (local_copy, Dataset):
        with pytest.raises(RemoteError, match="points outside its folder") as caught:
            read(f"s3://{bucket}/set")
        assert "published.json" in str(caught.value)
    assert everything(above) == before
