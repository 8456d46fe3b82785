"""File locations: local paths, and URLs of remote stores with the same interface."""

from __future__ import annotations

import fnmatch
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from viviane.core.errors import ConfigError, RemoteError
from viviane.core.remote.ranged_file import RangedFile
from viviane.core.remote.retry import retried
from viviane.core.remote.systems import SCHEMES, connect

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,}(?=[^/])", re.IGNORECASE)  # pathlib makes two slashes one
_PIECE_BYTES: Final = 8 << 20
_LONGEST_NAME_BYTES: Final = 255  # on every common file system


@dataclass(frozen=True)
class RemoteStatus:
    """Size and modification time of a remote file, with the names of os.stat_result."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder of a remote store; the methods of pathlib.Path for reading and writing.

    Args:
        scheme: one of s3, gs, hdfs, webhdfs.
        host: the bucket, or the server and its port.
        key: the path without leading and trailing slashes.

    Example:
        >>> train = RemotePath("s3", "clicks", "sets/train")
        >>> str(train / "part-00000.parquet"), train.parent.name
        ('s3://clicks/sets/train/part-00000.parquet', 'sets')
    """

    scheme: str
    host: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}/{self.key}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.scheme, self.host, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """The last component."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """The suffix of the name, including the dot."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder; the parent of the bucket is the bucket."""
        return RemotePath(self.scheme, self.host, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Return a file in the same folder."""
        return self.parent / name

    def absolute(self) -> RemotePath:
        """Return this path: a URL is never relative."""
        return self

    resolve = absolute

    @property
    def system(self) -> Any:
        """The pyarrow file system."""
        return connect(self.scheme, self.host)

    @property
    def inner(self) -> str:
        """The path inside that file system."""
        return f"{self.host}/{self.key}".rstrip("/") if self.scheme in ("s3", "gs") else f"/{self.key}"

    def _info(self) -> Any:
        return retried(lambda: self.system.get_file_info(self.inner), str(self), "looking up")

    def exists(self) -> bool:
        """Return whether there is a file or a non-empty folder."""
        return bool(self._info().type.name != "NotFound")

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return bool(self._info().is_file)

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        return bool(self._info().type.name == "Directory")

    def stat(self) -> RemoteStatus:
        """Return size and modification time.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        info = self._info()
        if not info.is_file:
            raise FileNotFoundError(2, "no such file", str(self))
        return RemoteStatus(int(info.size), int(info.mtime_ns or 0))

    def files(self, *, recursive: bool = False) -> dict[RemotePath, RemoteStatus]:
        """Return the files of this folder, in order of names; `recursive`: including those of subfolders."""
        return {one: status for one, status in self._entries(recursive) if status is not None}

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the entries of this folder, in order of names."""
        return (one for one, _ in self._entries(recursive=False))

    def _entries(self, recursive: bool) -> list[tuple[RemotePath, RemoteStatus | None]]:
        from pyarrow.fs import FileSelector

        def request() -> list[Any]:
            selector = FileSelector(self.inner, allow_not_found=True, recursive=recursive)
            return list(self.system.get_file_info(selector))

        found = []
        for info in retried(request, str(self), "listing"):
            inside = info.path.lstrip("/")[len(self.inner.lstrip("/")) :].strip("/")
            status = RemoteStatus(int(info.size), int(info.mtime_ns or 0)) if info.is_file else None
            if inside:
                found.append((self / inside, status))
        return sorted(found, key=lambda one: one[0])

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the entries of this folder whose names match a pattern without slashes."""
        return (one for one in self.iterdir() if fnmatch.fnmatchcase(one.name, pattern))

    def ranged(self) -> RangedFile:
        """Open for ranged reads.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        return RangedFile(self.system, self.inner, str(self))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open for sequential reads in large blocks."""
        if mode != "rb":
            raise ConfigError("a remote file can only be read as bytes", where=str(self), value=mode, allowed="rb")
        return io.BufferedReader(self.ranged(), _PIECE_BYTES)

    def read_bytes(self) -> bytes:
        """Return the complete content."""
        with self.ranged() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the complete content as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Write a file; on an object store this is atomic.

        Raises:
            RemoteError: the store does not respond or refuses, or stored another number of bytes.
        """

        def request() -> None:
            if self.scheme not in ("s3", "gs"):
                self.system.create_dir(self.parent.inner, recursive=True)
            # otherwise pyarrow compresses depending on the suffix
            with self.system.open_output_stream(self.inner, compression=None) as stream:
                stream.write(data)

        retried(request, str(self), "writing")
        if self.stat().st_size != len(data):
            raise RemoteError("the store stored another number of bytes than were written", where=str(self))

    def remove_folder(self) -> None:
        """Remove a folder with everything in it."""
        retried(lambda: self.system.delete_dir(self.inner), str(self), "removing")


AnyPath: TypeAlias = Path | RemotePath


def location(path: str | Path | RemotePath) -> AnyPath:
    """Return a local path, or the remote path of a URL.

    Raises:
        ConfigError: the scheme is unknown, or the URL contains credentials.

    Example:
        >>> location("s3://clicks/sets/train/").name, location(Path("s3://clicks/a")), location("file:///tmp/a")
        ('train', RemotePath(scheme='s3', host='clicks', key='a'), PosixPath('/tmp/a'))
    """
    if isinstance(path, RemotePath):
        return path
    if not isinstance(path, str | os.PathLike):
        raise ConfigError("not a path", value=type(path).__name__, allowed="a str, a pathlib.Path, or a URL")
    text = os.fsdecode(path)
    if "\0" in text:
        raise ConfigError("a path must not contain a NUL character", value=text)
    match = _URL.match(text)
    if match is None:
        return _local(unquote(urlsplit(text).path) if text.startswith("file:/") else path)
    scheme = match[1].lower()
    if scheme == "file":
        return _local(unquote(urlsplit(text).path))
    host, _, key = text[match.end() :].partition("/")
    if "@" in host:
        raise ConfigError(
            "a URL must not contain a user or a password: URLs appear in settings, logs and error messages",
            where=f"{scheme}://...@{host.rpartition('@')[2]}/{key}",
            fix="set the credentials in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "GOOGLE_APPLICATION_CREDENTIALS, HADOOP_USER_NAME",
        )
    if scheme not in SCHEMES:
        if len(scheme) == 1:  # a drive letter
            return _local(path)
        raise ConfigError("unknown URL scheme", where=text.partition("?")[0], value=scheme,
                          allowed=", ".join(("file", *SCHEMES)))  # fmt: skip
    parts = [part for part in key.split("/") if part]
    if {".", ".."} & set(parts):
        raise ConfigError("the path of a URL must not contain . or ..", where=text)
    return RemotePath(scheme, host, "/".join(parts))


def _local(path: str | os.PathLike[str]) -> Path:
    parts = os.fspath(path).replace(os.sep, "/").split("/")
    longest = max((len(os.fsencode(part)) for part in parts if len(part) > _LONGEST_NAME_BYTES // 4), default=0)
    if longest > _LONGEST_NAME_BYTES:
        raise ConfigError("a name in a path is too long", value=f"{longest} bytes",
                          allowed=f"{_LONGEST_NAME_BYTES} bytes", fix="choose a shorter path")  # fmt: skip
    return Path(path)


def local_path(path: str | Path) -> Path:
    """Return a path of this machine, for files that are changed in place.

    Raises:
        ConfigError: it is a URL, has a name that is too long, or contains a NUL character.
    """
    place = location(path)
    if isinstance(place, RemotePath):
        raise ConfigError("this must be on a disk of this machine", value=str(place), allowed="a local path")
    return place


@contextmanager
def arrow_source(path: AnyPath) -> Iterator[Any]:
    """Yield a source for pyarrow: the path of a local file, or a remote file with ranged reads."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with path.ranged() as file:
        yield file
