"""Atomic publication of a remote folder on stores that cannot rename folders.

<url>/versions/<version>/...      the files
<url>/published.json              the current version, and the size and checksum of each of its files

The version folder is uploaded and verified first. published.json is written last, and readers see only the version that
it names. The previous version is kept until the next one is published, so that active readers can finish.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError, DataError, RemoteError, VivianeError
from viviane.core.exchange import recover
from viviane.core.file_names import check_file_name
from viviane.core.json_files import json_object, parse_json
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.remote.retry import retried
from viviane.core.remote.systems import rename_over
from viviane.core.threads import map_at_once

PUBLISHED_FILE: Final = "published.json"
VERSIONS: Final = "versions"
_FORMAT: Final = "viviane-published"
_LEVELS: Final = 3  # folders that are searched for published.json: the path and its parents
_PIECE_BYTES: Final = 8 << 20
_THREADS: Final = 4


@dataclass(frozen=True)
class PublishedFile:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Published:
    """The content of published.json.

    Args:
        root: the folder of published.json.
        folder: folder of the current version, inside root.
        files: files by path inside that folder.
    """

    root: RemotePath
    folder: str
    files: dict[str, PublishedFile]

    @classmethod
    def load(cls, root: RemotePath) -> Published | None:
        """Return the content of published.json in a folder; None if it does not exist, or is a file of a model.

        Raises:
            RemoteError: the file is damaged.
        """
        file = root / PUBLISHED_FILE
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            parsed = parse_json(content, where=str(file), error=RemoteError)
            data = json_object(parsed, where=str(file), error=RemoteError)
            if "format" not in data:  # which updates a saved model contains
                return None
            if data["format"] != _FORMAT or data["version"] != 1:
                raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
            files = {name: PublishedFile(int(one["bytes"]), str(one["sha256"])) for name, one in data["files"].items()}
            for name in (data["folder"], *files):
                check_file_name(name, where=str(file), error=RemoteError)
            return cls(root, str(data["folder"]), files)
        except RemoteError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RemoteError(
                "published.json cannot be read", where=str(file), value=str(error), fix="publish it again"
            ) from error

    @property
    def place(self) -> RemotePath:
        """The version folder."""
        return self.root / self.folder

    def compare(self, inside: str = "") -> None:
        """Compare the sizes of files with published.json.

        Raises:
            RemoteError: a file is missing, or has another size.
        """
        there = {str(one): status.st_size for one, status in (self.place / inside).files(recursive=True).items()}
        for name, entry in self.files.items():
            if inside and not name.startswith(f"{inside}/"):
                continue
            size = there.get(str(self.place / name))
            if size != entry.bytes:
                raise RemoteError(
                    "a published file is missing" if size is None
                    else "a published file has an unexpected size; it may be truncated",
                    where=str(self.place / name), value="absent" if size is None else f"{size} bytes",
                    allowed=f"{entry.bytes} bytes", fix="publish it again",
                )  # fmt: skip


def find_published(path: RemotePath) -> tuple[Published, str] | None:
    """Return the publication of a folder or of a parent, and the path inside it; None for a plain folder.

    Raises:
        RemoteError: published.json is damaged, or an upload was not finished.
    """
    inside, root = "", path
    for _ in range(_LEVELS):
        found = Published.load(root)
        if found is not None:
            return found, inside
        if not root.key or root.parent.name == VERSIONS:
            break
        inside, root = f"{root.name}/{inside}".strip("/"), root.parent
    if (path / VERSIONS).is_dir():
        raise RemoteError(
            "nothing is published here: an upload is not finished", where=str(path),
            fix="wait for it, or publish again",
        )  # fmt: skip
    return None


def published_place(path: RemotePath) -> RemotePath:
    """Return the current location of the files of a URL, with sizes verified; a plain folder is returned unchanged."""
    found = find_published(path)
    if found is None:
        return path
    published, inside = found
    published.compare(inside)
    return published.place / inside if inside else published.place


def published_location(path: str | AnyPath) -> AnyPath:
    """Return the path of a file or folder; for a published URL, its path in the folder of the current version.

    A local output that a killed process had renamed before replacing it is restored.

    Raises:
        ConfigError: see `location`.
        RemoteError: the store does not respond, or its files differ from what was published.
    """
    place = location(path)
    if isinstance(place, RemotePath):
        return published_place(place)
    recover(place)
    return place


@contextmanager
def publish_folder(target: RemotePath, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield an empty local folder that is published at a URL when the block succeeds.

    Raises:
        ConfigError: something is published there and `overwrite` is False.
        RemoteError: the store does not respond or refuses; the previous version stays current.
    """
    if not overwrite and target.exists():
        raise ConfigError("the URL already exists", where=str(target), fix="choose another, or pass overwrite=True")
    with tempfile.TemporaryDirectory(prefix="viviane-publish-") as name:
        work = Path(name) / (target.name or "folder")
        work.mkdir()
        yield work
        upload_folder(work, target)


def upload_folder(source: Path, target: RemotePath) -> Published:
    """Publish a local folder at a URL; see the module docstring.

    Raises:
        RemoteError: the store does not respond or refuses; the previous version stays current.
    """
    earlier = Published.load(target)
    version = f"{VERSIONS}/{time.time_ns():020d}-{secrets.token_hex(4)}"  # names sort by time
    place = target / version
    names = sorted(file.relative_to(source).as_posix() for file in source.rglob("*") if file.is_file())
    try:
        sent = map_at_once(lambda name: upload_file(source / name, place / name), names, _THREADS)
        entries = dict(zip(names, sent, strict=True))
        published = Published(target, version, entries)
        published.compare()
    except BaseException:
        with suppress(VivianeError):  # the original error propagates; an unreferenced version does no harm
            place.remove_folder()
        raise
    content: dict[str, Any] = {
        "format": _FORMAT, "version": 1, "folder": version, "files": {n: vars(e) for n, e in entries.items()},
    }  # fmt: skip
    _switch(target / PUBLISHED_FILE, (json.dumps(content, indent=1) + "\n").encode())
    kept = {version, earlier.folder if earlier is not None else ""}
    for old in (target / VERSIONS).iterdir():
        if f"{VERSIONS}/{old.name}" not in kept and old.name < place.name:
            old.remove_folder()
    return published


def _switch(file: RemotePath, data: bytes) -> None:
    """Replace a file atomically: by a write on object stores, by a rename on file systems."""
    if file.scheme in ("s3", "gs"):
        file.write_bytes(data)
        return
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    new.write_bytes(data)

    def rename() -> None:
        if new.exists():  # otherwise a seemingly failed attempt had succeeded
            rename_over(new.system, new.inner, file.inner)

    retried(rename, str(file), "publishing")


def upload_file(source: Path, target: RemotePath) -> PublishedFile:
    """Upload a local file to a URL, in chunks; a failed attempt is repeated from the start."""

    def request() -> PublishedFile:
        digest, size = hashlib.sha256(), 0
        if target.scheme not in ("s3", "gs"):
            target.system.create_dir(target.parent.inner, recursive=True)
        with source.open("rb") as file, target.system.open_output_stream(target.inner, compression=None) as stream:
            while piece := file.read(_PIECE_BYTES):
                stream.write(piece)
                digest.update(piece)
                size += len(piece)
        return PublishedFile(size, digest.hexdigest())

    entry = retried(request, str(target), "writing")
    if target.stat().st_size != entry.bytes:
        raise RemoteError("the store stored another number of bytes than were written", where=str(target))
    return entry


def refuse_missing(path: RemotePath) -> None:
    """Raise an error for a URL that does not exist.

    Raises:
        DataError: the URL does not exist.
    """
    if not path.exists():
        raise DataError("the URL does not exist", where=str(path), fix="check the bucket's name and the path")
