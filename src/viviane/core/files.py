"""Write so that a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from viviane.core.locations import RemotePath, location


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes_atomic(path: str | Path | RemotePath, data: bytes) -> None:
    """Write `data` to a temporary name beside `path`, flush it, and rename it into place; to a URL, in one request."""
    path = location(path)
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # noqa: PTH101 - mkstemp makes files private; results are not
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json_atomic(path: str | Path | RemotePath, value: Any) -> None:
    """Write `value` as indented JSON, atomically; keys keep their order, so that diffs stay small."""
    write_bytes_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


@contextmanager
def replace_folder(path: str | Path | RemotePath) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path` that takes its place when the block succeeds.

    An existing `path` stays whole until the new one is complete; a failed block leaves it untouched. The folder of a
    URL is a local one that is uploaded at the end.
    """
    path = location(path)
    if isinstance(path, RemotePath):
        from viviane.core.remote.published import publish_folder

        with publish_folder(path) as work:
            yield work
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    work.chmod(0o755)
    try:
        yield work
        for file in work.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        sync_folder(work)
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.exists():
            path.rename(old)
        work.rename(path)
        sync_folder(path.parent)
        if old.exists():
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
