"""HDFS over HTTP, through the REST interface of a NameNode (WebHDFS), as a pyarrow file system.

Source: Hadoop 2.7, "WebHDFS REST API". The NameNode handles metadata and redirects reads and writes to a DataNode.
"""

from __future__ import annotations

import getpass
import io
import os
import tempfile
from typing import Any, Final, NoReturn
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from viviane.core.errors import ConfigError
from viviane.core.optional import require

_SPOOL_BYTES: Final = 32 << 20
_GONE: Final = ("FileNotFoundException",)
_REFUSED: Final = ("AccessControlException", "SecurityException")
_UNAUTHORIZED: Final = 401


class WebHdfs(fs.FileSystemHandler):
    """The file system of one NameNode.

    Args:
        host: host and port, host:9870; the user is HADOOP_USER_NAME, or that of this process.
        timeout: request timeout in seconds.

    Raises:
        MissingExtraError: requests is not installed.
    """

    def __init__(self, host: str, timeout: float) -> None:
        requests: Any = require("requests", extra="hdfs", purpose="reading and writing webhdfs:// URLs")
        if not host.partition(":")[2].isdigit():
            raise ConfigError(
                "a webhdfs:// URL needs the NameNode's HTTP port", value=f"webhdfs://{host}",
                allowed="webhdfs://host:9870/path (Hadoop 2: port 50070)",
            )  # fmt: skip
        self.host, self._timeout = host, timeout
        self._session: Any = requests.Session()
        self._session.trust_env = False  # do not use a proxy or .netrc
        self._user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WebHdfs) and self.host == other.host

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    # Requests ---------------------------------------------------------------------------------------------

    def call(self, method: str, operation: str, path: str, *, follow: bool = True, **parameters: Any) -> Any:
        """Send a request to the NameNode; redirects are followed unless data must be sent to their target.

        Raises:
            FileNotFoundError, PermissionError, OSError: the server reports this error, or does not respond.
        """
        url = f"http://{self.host}/webhdfs/v1/{quote(path.strip('/'))}"
        wanted = {"op": operation, "user.name": self._user, **parameters}
        return _checked(
            self._session.request(method, url, params=wanted, timeout=self._timeout, allow_redirects=follow), path
        )

    def send(self, place: str, data: io.BufferedIOBase | tempfile.SpooledTemporaryFile[bytes], path: str) -> None:
        """Send the content of a file to the DataNode at a URL."""
        headers = {"Content-Type": "application/octet-stream"}
        _checked(self._session.put(place, data=data, headers=headers, timeout=self._timeout), path)

    def _status(self, path: str) -> Any:
        return self.call("GET", "GETFILESTATUS", path).json()["FileStatus"]

    def _list(self, path: str) -> list[Any]:
        found: list[Any] = self.call("GET", "LISTSTATUS", path).json()["FileStatuses"]["FileStatus"]
        return found

    # Interface of pyarrow.fs.FileSystemHandler ------------------------------------------------------------

    def get_type_name(self) -> str:
        """Name of this kind of file system."""
        return "webhdfs"

    def normalize_path(self, path: str) -> str:
        """Return the path unchanged."""
        return path

    def get_file_info(self, paths: Any) -> list[Any]:
        """Look up files; missing files are NotFound; raises an error if the server does not respond."""
        found = []
        for path in paths:
            try:
                found.append(_info(path, self._status(path)))
            except FileNotFoundError:
                found.append(fs.FileInfo(path, fs.FileType.NotFound))
        return found

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        """List a folder."""
        base = selector.base_dir.rstrip("/")
        try:
            if self._status(base or "/")["type"] != "DIRECTORY":
                raise NotADirectoryError(base)
            return self._inside(base, selector.recursive)
        except FileNotFoundError:
            if selector.allow_not_found:
                return []
            raise

    def _inside(self, folder: str, recursive: bool) -> list[Any]:
        found = []
        for status in self._list(folder or "/"):
            path = f"{folder}/{status['pathSuffix']}"
            found.append(_info(path, status))
            if recursive and status["type"] == "DIRECTORY":
                found += self._inside(path, recursive)
        return found

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder and its parents."""
        self.call("PUT", "MKDIRS", path)

    def delete_dir(self, path: str) -> None:
        """Remove a folder with everything in it."""
        self.call("DELETE", "DELETE", path, recursive="true")

    def delete_file(self, path: str) -> None:
        """Remove a file."""
        self.call("DELETE", "DELETE", path)

    def rename_over(self, source: str, target: str) -> None:
        """Rename a file atomically, replacing an existing one."""
        self.call("PUT", "RENAME", source, destination=target, renameoptions="OVERWRITE")

    def open_input_file(self, path: str) -> Any:
        """Open for ranged reads."""
        status = self._status(path)
        if status["type"] != "FILE":
            raise IsADirectoryError(path)
        return pa.PythonFile(_Reader(self, path, int(status["length"])), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        """Open for writing; the file is sent in one request when it is closed."""
        return pa.PythonFile(_Writer(self, path), mode="w")

    def _unsupported(self, *_: Any) -> NoReturn:
        raise NotImplementedError("not used on webhdfs:// URLs")

    delete_dir_contents = delete_root_dir_contents = _unsupported  # type: ignore[assignment]
    move = copy_file = open_append_stream = _unsupported  # type: ignore[assignment]


class _Reader(io.RawIOBase):
    """Ranged reads of a file, one request each."""

    def __init__(self, system: WebHdfs, path: str, size: int) -> None:
        self._system, self._path, self._size, self._at = system, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = self._size - self._at
        count = max(0, left if size is None or size < 0 else min(size, left))
        if not count:
            return b""
        data: bytes = self._system.call("GET", "OPEN", self._path, offset=self._at, length=count).content
        self._at += len(data)
        return data


class _Writer(io.RawIOBase):
    """Buffers bytes in memory, beyond 32 MiB on disk, and sends them when the file is closed."""

    def __init__(self, system: WebHdfs, path: str) -> None:
        self._system, self._path = system, path
        self._waiting = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 - closed below

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._waiting.tell()

    def write(self, data: Any) -> int:
        return self._waiting.write(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            place = self._system.call("PUT", "CREATE", self._path, follow=False, overwrite="true").headers["Location"]
            self._waiting.seek(0)
            self._system.send(place, self._waiting, self._path)
        finally:
            self._waiting.close()
            super().close()


def _info(path: str, status: Any) -> Any:
    if status["type"] == "DIRECTORY":
        return fs.FileInfo(path, fs.FileType.Directory)
    changed = int(status["modificationTime"]) * 1_000_000
    return fs.FileInfo(path, fs.FileType.File, size=int(status["length"]), mtime_ns=changed)


def _checked(answer: Any, path: str) -> Any:
    """Return a response if it is not an error; servers report errors in JSON, regardless of the HTTP status."""
    if answer.status_code < 400:
        return answer
    if answer.status_code == _UNAUTHORIZED:
        raise PermissionError("the server requires Kerberos or a token, which webhdfs:// does not support: use hdfs://")
    try:
        reply = answer.json()["RemoteException"]
        name, text = str(reply["exception"]), str(reply["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        raise OSError(f"HTTP status {answer.status_code} {answer.reason}") from None
    if name in _GONE:
        raise FileNotFoundError(2, text, path)
    raise PermissionError(f"{name}: {text}") if name in _REFUSED else OSError(f"{name}: {text}")
