"""A size-limited cache of verified local copies of remote files and folders.

<cache>/<key>/        one complete copy: downloaded under a temporary name and renamed
<cache>/<key>.lock    shared lock of every process that uses the copy, so that it is not removed while in use

VIVIANE_CACHE sets the folder, by default ~/.cache/viviane; VIVIANE_CACHE_GB its maximum size, by default 50.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from viviane.core.errors import DataError, RemoteError
from viviane.core.exchange import recover
from viviane.core.file_names import check_file_name
from viviane.core.files import replace_folder
from viviane.core.locations import RemotePath, location
from viviane.core.logging import get_logger
from viviane.core.remote.published import PublishedFile, find_published
from viviane.core.remote.retry import bounded_number
from viviane.core.threads import map_at_once

CACHE_VARIABLE: Final = "VIVIANE_CACHE"
LIMIT_VARIABLE: Final = "VIVIANE_CACHE_GB"
_PIECE_BYTES: Final = 8 << 20
_THREADS: Final = 4
_log = get_logger("remote")
_one_at_a_time = threading.Lock()
_held: dict[Path, IO[Any]] = {}  # locks of the copies that this process uses, until it exits


@atexit.register
def _close_locks() -> None:
    for lock in _held.values():
        lock.close()


def local_copy(path: str | Path | RemotePath) -> Path:
    """Return a local path unchanged, or the verified local copy of a remote folder or file.

    Raises:
        RemoteError: the URL does not exist, a downloaded file is damaged, or the store does not respond.
        DataError: the copy is larger than the maximum cache size, or the disk is full.
    """
    place = location(path)
    if isinstance(place, Path):
        recover(place)
        return place
    with _one_at_a_time:
        return _fetch(place)


def cache_folder() -> Path:
    """Return the folder of local copies."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "viviane"


def copy_folder(remote: RemotePath, target: Path) -> None:
    """Download a remote folder to a local one outside the cache, with the same verification.

    Raises:
        RemoteError: the URL does not exist, a downloaded file is damaged, or the store does not respond.
        DataError: the disk is full.
    """
    files, _, place = _wanted(remote)
    target.parent.mkdir(parents=True, exist_ok=True)
    _download(remote, place, files, target)


def _fetch(remote: RemotePath) -> Path:
    files, version, place = _wanted(remote)
    key = hashlib.blake2b(f"{remote}\n{version}".encode(), digest_size=16).hexdigest()
    target = cache_folder() / key
    target.parent.mkdir(parents=True, exist_ok=True)
    if target not in _held:
        lock = target.with_name(f"{key}.lock").open("w")
        try:
            _flock(lock, "shared")
            if not target.is_dir():
                _flock(lock, "exclusive")  # not granted while others use the copy; then it exists
                if not target.is_dir():
                    _free_space(sum(entry.bytes for entry in files.values()), target.parent, remote)
                    _download(remote, place, files, target)
                _flock(lock, "shared")
        except BaseException:
            lock.close()
            raise
        _held[target] = lock
    os.utime(target)  # records the time of its last use
    return target / remote.name if list(files) == [""] else target


def _wanted(remote: RemotePath) -> tuple[dict[str, PublishedFile], str, RemotePath]:
    """Return the files by path inside the folder, a fingerprint of the content, and the location of the folder."""
    found = find_published(remote)
    if found is not None:
        published, inside = found
        published.compare(inside)
        start = f"{inside}/" if inside else ""
        files = {n.removeprefix(start): e for n, e in published.files.items() if n.startswith(start)}
        if files:
            return files, published.folder, published.place / inside
        if inside in published.files:
            return {"": published.files[inside]}, published.folder, published.place / inside
    elif remote.is_file():
        status = remote.stat()
        return {"": PublishedFile(status.st_size, "")}, str(status), remote
    else:
        listed = remote.files(recursive=True)
        if listed:
            inner = len(str(remote)) + 1
            plain = {str(one)[inner:]: PublishedFile(status.st_size, "") for one, status in listed.items()}
            stamps = {str(one): [status.st_size, status.st_mtime_ns] for one, status in listed.items()}
            return plain, json.dumps(stamps), remote
    raise RemoteError("the URL does not exist", where=str(remote), fix="check the bucket's name and the path")


def _download(remote: RemotePath, place: RemotePath, files: Mapping[str, PublishedFile], target: Path) -> None:
    need = sum(entry.bytes for entry in files.values())
    _log.info("copying %s, %d bytes, to %s", remote, need, target)
    try:
        with replace_folder(target) as work:
            for name in filter(None, files):  # keys of a store may be any text
                check_file_name(name, where=str(place), error=RemoteError)

            def fetch(name: str) -> None:
                _fetch_file(place / name if name else place, files[name], work / (name or remote.name))

            map_at_once(fetch, files, _THREADS)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DataError(
            "the disk is full" if full else "a local copy cannot be written",
            where=str(target.parent), value=f"{need} bytes are needed, {free} are free ({error.strerror})",
            fix=f"free disk space, or set a folder on another disk: {CACHE_VARIABLE}=/path",
        ) from error  # fmt: skip


def _fetch_file(source: RemotePath, entry: PublishedFile, target: Path) -> None:
    """Download one file, and compare its size and, if known, its checksum."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, at = hashlib.sha256(), 0
    try:
        reader = source.ranged()
    except FileNotFoundError:
        raise RemoteError("a file was removed while it was downloaded", where=str(source)) from None
    with reader, target.open("wb") as file:
        if reader.size == entry.bytes:
            while piece := reader.read_at(at, _PIECE_BYTES):
                file.write(piece)
                digest.update(piece)
                at += len(piece)
    if at != entry.bytes or (entry.sha256 and digest.hexdigest() != entry.sha256):
        raise RemoteError(
            "a remote file is truncated or altered",
            where=str(source),
            value=f"{reader.size} bytes, SHA-256 {digest.hexdigest()}",
            allowed=f"{entry.bytes} bytes, SHA-256 {entry.sha256 or 'unknown'}",
            fix="publish it again",
        )


def _free_space(need: int, cache: Path, remote: RemotePath) -> None:
    """Remove the least recently used copies until another one fits."""
    limit = int(bounded_number(LIMIT_VARIABLE, 50, least=0) * 1e9)
    if need > limit:
        raise DataError(
            "the data exceed the maximum size of the local cache", where=str(remote), value=f"{need} bytes",
            allowed=f"{limit} bytes",
            fix=f"raise {LIMIT_VARIABLE}, or store data sets as Parquet, which is read over the network without a copy",
        )  # fmt: skip
    copies = sorted((one for one in cache.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime_ns)
    sizes = {one: sum(file.stat().st_size for file in one.rglob("*") if file.is_file()) for one in copies}
    total = sum(sizes.values())
    for old in copies:
        if total + need <= limit:
            return
        if _remove_unused(old):
            total -= sizes[old]
    if total + need > limit:
        raise DataError(
            "the local cache is full, and all copies are in use", where=str(cache), value=f"{total + need} bytes",
            allowed=f"{limit} bytes", fix=f"raise {LIMIT_VARIABLE}, or end the processes that use them",
        )  # fmt: skip


def _remove_unused(copy: Path) -> bool:
    """Remove a copy that no process uses, or a leftover of a killed download."""
    key = copy.name.strip(".").partition(".")[0]  # a download in progress is .<key>.<random>.tmp
    with copy.with_name(f"{key}.lock").open("w") as lock:
        if not _flock(lock, "exclusive", wait=False):
            return False
        gone = Path(tempfile.mkdtemp(dir=copy.parent, prefix=".gone."))
        copy.rename(gone / "copy")
        shutil.rmtree(gone)
    return True  # the lock file is kept: another process may be waiting for it


def _flock(file: IO[Any], kind: str, *, wait: bool = True) -> bool:
    if sys.platform == "win32":  # advisory locks of this kind are POSIX
        return True
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if kind == "exclusive" else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
